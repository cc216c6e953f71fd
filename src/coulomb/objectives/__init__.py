"""Energies of particles that come from data: of each one alone, and of all together.

`alignment` has the paper's energies, in which a particle knows the labels but not what
the others already say. `joint` has energies of the whole feature set, which are ours.
"""

from coulomb.objectives.alignment import (
    LABEL_KINDS,
    AbstractObjective,
    AbstractOneBody,
    AbstractSampled,
    Alignment,
    CentredAlignment,
    Field,
    FourierAlignment,
    GaussianPrior,
    Sample,
    centred_alignment,
    label_matrix,
)
from coulomb.objectives.joint import (
    AbstractJoint,
    Evidence,
    LeaveOneOut,
    SharedScales,
    TunedRidge,
)

__all__ = [
    "LABEL_KINDS",
    "AbstractJoint",
    "AbstractObjective",
    "AbstractOneBody",
    "AbstractSampled",
    "Alignment",
    "CentredAlignment",
    "Evidence",
    "Field",
    "FourierAlignment",
    "GaussianPrior",
    "LeaveOneOut",
    "Sample",
    "SharedScales",
    "TunedRidge",
    "centred_alignment",
    "label_matrix",
]
