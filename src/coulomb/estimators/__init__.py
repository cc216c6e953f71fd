"""The scikit-learn edge: learned random features and the baselines they must beat."""

from coulomb.estimators.baselines import (
    ImportanceSampler,
    MultipleKernelClassifier,
    OrthogonalSampler,
)
from coulomb.estimators.coulomb import CoulombSampler

__all__ = [
    "CoulombSampler",
    "ImportanceSampler",
    "MultipleKernelClassifier",
    "OrthogonalSampler",
]
