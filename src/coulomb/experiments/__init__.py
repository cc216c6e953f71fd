"""Every table and figure of the paper: plan, jobs, records, claims."""

from coulomb.experiments import (  # noqa: F401  registers the members
    phase_a,
    synthetic,
    text,
    theory,
)
from coulomb.experiments.base import AbstractExperiment, Outcome, Settings, experiments
from coulomb.experiments.records import Record, load_experiments, load_records

__all__ = [
    "AbstractExperiment",
    "Outcome",
    "Record",
    "Settings",
    "experiments",
    "load_experiments",
    "load_records",
]
