"""The continuum: mean field, equilibrium, Gibbs sampling and large deviations."""

from coulomb.theory.deviations import (
    ImportanceSettings,
    Scaling,
    contract,
    deviation_curve,
    free_energy_curve,
    kernel_observable,
    partition_function,
    rate_function,
    tail_probability,
)
from coulomb.theory.equilibrium import equilibrium, gibbs_equilibrium, ground_state
from coulomb.theory.expressions import parse_expression
from coulomb.theory.flow import FlowSettings, evolve, relax
from coulomb.theory.gap import GapSettings, line_distances, mean_field_gap
from coulomb.theory.gibbs import (
    TemperingSettings,
    effective_sample_size,
    gibbs_sample,
    split_r_hat,
)
from coulomb.theory.grids import Disc, Interval, RadialBall, Rectangle
from coulomb.theory.system import (
    MeanField,
    Potential,
    dissipation,
    finite_size_correction,
    measure_interaction,
    robin_residual,
)

__all__ = [
    "Disc",
    "FlowSettings",
    "GapSettings",
    "ImportanceSettings",
    "Interval",
    "MeanField",
    "Potential",
    "RadialBall",
    "Rectangle",
    "Scaling",
    "TemperingSettings",
    "contract",
    "deviation_curve",
    "dissipation",
    "effective_sample_size",
    "equilibrium",
    "evolve",
    "finite_size_correction",
    "free_energy_curve",
    "gibbs_equilibrium",
    "gibbs_sample",
    "ground_state",
    "kernel_observable",
    "line_distances",
    "mean_field_gap",
    "measure_interaction",
    "parse_expression",
    "partition_function",
    "rate_function",
    "relax",
    "robin_residual",
    "split_r_hat",
    "tail_probability",
]
