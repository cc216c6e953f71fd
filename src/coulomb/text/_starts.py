"""The weights that Phase A begins with, kept beside its particles.

Phase A may interrupt Phase B, and what it did can be judged only with the weights of
that moment. They are kept, since computing them again would cost the epochs before it,
would be exact with the same number of threads only, and would end with the first
release that trains in another way.
"""

from pathlib import Path

from coulomb._support.archive import write_archive
from coulomb.text.run_folder import check_tensors, read_tensors
from coulomb.text.setup import Setup
from coulomb.text.variants import find_variant

START = "start.safetensors"


def keep_start(particles: Path | None, setup: Setup) -> None:
    """Write the weights of the model, if it is about to be aligned."""
    if particles is None or find_variant(setup.settings.attention).phase_a != "align":
        return
    write_archive(particles.with_name(START), setup.model.state_dict(), {})


def take_start(folder: Path, setup: Setup) -> None:
    """Give the model the weights that Phase A of a run began with."""
    path = folder / START
    tensors, _ = read_tensors(path)
    check_tensors(path, tensors, setup.model.state_dict())
    setup.model.load_state_dict(tensors)
