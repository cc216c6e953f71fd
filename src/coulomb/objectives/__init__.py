"""Alignment energies: how badly the features of the particles explain the labels.

Energies are minimised everywhere; a score is minus an energy. With probability weights
`q_i` of the samples (1/n unless given) and a label matrix `Y`, the potential is

    V(w) = -(1/Z) sum_{i != j} q_i q_j (Y_i . Y_j) phi(x_i, w) phi(x_j, w),

with `Z = 1 - sum_i q_i^2`, so that equal weights give the paper's 1/(n(n-1)).
"""

from coulomb.objectives.alignment import (
    Alignment,
    CentredAlignment,
    FourierAlignment,
    centred_alignment,
)
from coulomb.objectives.base import (
    LABEL_KINDS,
    AbstractObjective,
    AbstractOneBody,
    AbstractSampled,
    Field,
    GaussianPrior,
    Sample,
    label_matrix,
)

__all__ = [
    "LABEL_KINDS",
    "AbstractObjective",
    "AbstractOneBody",
    "AbstractSampled",
    "Alignment",
    "CentredAlignment",
    "Field",
    "FourierAlignment",
    "GaussianPrior",
    "Sample",
    "centred_alignment",
    "label_matrix",
]
