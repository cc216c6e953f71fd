"""The scikit-learn edge: learned random features and the baselines they must beat."""

from coulomb.estimators.baselines import (
    ImportanceSampler,
    MultipleKernelClassifier,
    MultipleKernelRegressor,
    OrthogonalSampler,
)
from coulomb.estimators.coulomb import CoulombSampler
from coulomb.estimators.predictors import CoulombClassifier, CoulombRegressor

__all__ = [
    "CoulombClassifier",
    "CoulombRegressor",
    "CoulombSampler",
    "ImportanceSampler",
    "MultipleKernelClassifier",
    "MultipleKernelRegressor",
    "OrthogonalSampler",
]
