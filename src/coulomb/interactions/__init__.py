"""Interactions: radial pair potentials that keep particles apart, and their sums.

`W = (1 / (2 N (N-1))) sum_{k != l} g(|w_k - w_l|)`. What the dynamics needs of it is,
for each particle, the potential it feels, `u_k = (1/(N-1)) sum_l g(|w_k - w_l|)`, and
its gradient in `w_k`, which is `N grad_k W`. A *sum* computes both: exactly, by
unbiased random batches, or with a far field whose cost grows linearly in `N`.

Particles at the same place have no direction to part in, so they get one: the pair is
pushed apart along a fixed direction of their two indices, with the force at the
truncation (or at `CLOSEST` without one). It is the same in every run and antisymmetric,
so that the centre of mass stays.
"""

from coulomb.interactions.potentials import (
    AbstractInteraction,
    Coulomb,
    Log,
    PairField,
    Riesz,
    interactions,
)
from coulomb.interactions.sums import (
    AbstractPairSum,
    ExactSum,
    FarFieldSum,
    RandomBatchSum,
    pair_energy,
    pair_sums,
)

__all__ = [
    "AbstractInteraction",
    "AbstractPairSum",
    "Coulomb",
    "ExactSum",
    "FarFieldSum",
    "Log",
    "PairField",
    "RandomBatchSum",
    "Riesz",
    "interactions",
    "pair_energy",
    "pair_sums",
]
