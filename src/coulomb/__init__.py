"""Learn kernels as particle systems.

Random features are charged particles: attracted by the labels (kernel-target
alignment), kept apart by a Riesz or Coulomb repulsion, moved by projected Langevin
dynamics.

>>> from coulomb import CoulombSampler
>>> CoulombSampler(n_components=64)
CoulombSampler(n_components=64)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coulomb._support.moved import register
from coulomb._version import __version__

if TYPE_CHECKING:
    from coulomb.domains import Ball, Box, Space, Sphere
    from coulomb.energy import Hamiltonian
    from coulomb.estimators import (
        CoulombClassifier,
        CoulombRegressor,
        CoulombSampler,
        ImportanceSampler,
        MultipleKernelClassifier,
        MultipleKernelRegressor,
        OrthogonalSampler,
    )
    from coulomb.features import Particles
    from coulomb.interactions import Coulomb, Riesz
    from coulomb.text import TextClassifier

register()

# Where each public name lives. Names are imported on first use: importing torch takes
# seconds, and `coulomb --help` must not.
_HOMES = {
    "Ball": "coulomb.domains",
    "Box": "coulomb.domains",
    "Coulomb": "coulomb.interactions",
    "CoulombClassifier": "coulomb.estimators",
    "CoulombRegressor": "coulomb.estimators",
    "CoulombSampler": "coulomb.estimators",
    "Hamiltonian": "coulomb.energy",
    "ImportanceSampler": "coulomb.estimators",
    "MultipleKernelClassifier": "coulomb.estimators",
    "MultipleKernelRegressor": "coulomb.estimators",
    "OrthogonalSampler": "coulomb.estimators",
    "Particles": "coulomb.features",
    "Riesz": "coulomb.interactions",
    "Space": "coulomb.domains",
    "Sphere": "coulomb.domains",
    "TextClassifier": "coulomb.text",
}

__all__ = [
    "Ball",
    "Box",
    "Coulomb",
    "CoulombClassifier",
    "CoulombRegressor",
    "CoulombSampler",
    "Hamiltonian",
    "ImportanceSampler",
    "MultipleKernelClassifier",
    "MultipleKernelRegressor",
    "OrthogonalSampler",
    "Particles",
    "Riesz",
    "Space",
    "Sphere",
    "TextClassifier",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = getattr(import_module(_HOMES[name]), name)
        return globals()[name]
    raise AttributeError(f"module 'coulomb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
