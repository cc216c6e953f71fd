"""The scikit-learn edge: learned random features and the baselines they must beat."""

from coulomb.estimators.coulomb import CoulombSampler
from coulomb.estimators.importance import ImportanceSampler
from coulomb.estimators.multiple_kernel import MultipleKernelClassifier
from coulomb.estimators.orthogonal import OrthogonalSampler

__all__ = [
    "CoulombSampler",
    "ImportanceSampler",
    "MultipleKernelClassifier",
    "OrthogonalSampler",
]
