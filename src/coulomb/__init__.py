"""Learn kernels as particle systems.

Random features are charged particles: attracted by the labels (kernel-target
alignment), kept apart by a Riesz or Coulomb repulsion, moved by projected Langevin
dynamics.

>>> from coulomb import CoulombSampler
>>> CoulombSampler(n_components=64)
CoulombSampler(n_components=64)
"""

from typing import TYPE_CHECKING

from coulomb._support.moved import names_from, register
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


# Names are imported on first use: importing torch takes seconds, and `coulomb --help`
# must not.
__getattr__ = names_from(
    "coulomb",
    *("domains", "interactions", "energy", "features", "estimators", "text"),
    names=__all__,
)


def __dir__() -> list[str]:
    return __all__
