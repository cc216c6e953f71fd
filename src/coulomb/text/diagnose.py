"""Tell whether Phase A of a run learned: its controls, from the folder of the run.

A run keeps what Phase A began with (the weights of that moment, `start.safetensors`)
and what became of the particles (`particles.safetensors`). With its data, settings and
vocabulary that is the whole of Phase A, whatever Phase B did afterwards. Nothing in the
folder is changed.
"""

import math
from pathlib import Path

import torch

from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.attention import AlignmentResult, Diagnosis, align, diagnose
from coulomb.attention.align.diagnosis import with_choice
from coulomb.dynamics.loop import StopReason, load_run
from coulomb.text import run_folder
from coulomb.text.align import START, alignment_problem, judge_start
from coulomb.text.data import Corpus
from coulomb.text.run_folder import CONFIG, PARTICLES, Config, read_tensors
from coulomb.text.settings import VARIANTS, find_variant
from coulomb.text.setup import Setup, set_up

# Sums in another order change the last digits, another model changes the first.
_SAME = 1e-2


def diagnose_run(
    folder: str | Path,
    *,
    corpus: Corpus | None = None,
    n_twins: int = 9,
    n_label_twins: int = 0,
    n_shuffles: int = 199,
    progress: bool | None = None,
) -> Diagnosis:
    """Compare Phase A of a run with its controls; see `coulomb.attention.diagnose`.

    Parameters
    ----------
    folder
        A run of `coulomb train` whose Phase A is over; Phase B need not be.
    corpus
        Its data, if it was passed in memory; None reads the files again.
    n_twins
        Runs of Phase A that feel noise and no labels, at least 2.
    n_label_twins
        Runs of Phase A on shuffled labels, none or at least 2; each costs as much as
        Phase A did.
    n_shuffles
        Permutations of the labels of held-out texts.
    progress
        Show a bar; None shows it on a terminal only.

    Returns
    -------
    Diagnosis
        Numbers per layer and head, and a `verdict`.

    Examples
    --------
    >>> import tempfile
    >>> from coulomb.text import build_corpus, preset, train_vocabulary
    >>> from coulomb.text import train_in_folder
    >>> rows = ["good film", "bad film"] * 64, ["+", "-"] * 64
    >>> corpus, words = build_corpus("tiny", rows), train_vocabulary(rows[0], size=40)
    >>> small = {"width": 16, "n_features": 8, "epochs": 1, "batch_size": 16}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     settings = preset("paper-main", small)
    ...     _ = train_in_folder(folder, corpus, settings, words)
    ...     print(diagnose_run(folder, corpus=corpus, n_twins=3).verdict[:21])
    Phase A did not learn
    """
    folder = Path(folder)
    config = run_folder.read_config(folder)
    _must_have_phase_a(folder, config)
    setup = _set_up(folder, config, corpus)
    chosen = judge_start(setup, n_shuffles)
    found = diagnose(
        _read_alignment(folder, setup),
        n_twins=n_twins,
        n_label_twins=n_label_twins,
        n_shuffles=n_shuffles,
        progress=progress,
    )
    return found if chosen is None else with_choice(found, chosen)


def _must_have_phase_a(folder: Path, config: Config) -> None:
    name = config.settings.model.attention
    kind = find_variant(name).phase_a
    if kind != "align":
        other = f"kernel-{name.partition('-')[2]}"
        wanted = other if other in VARIANTS else "kernel-softmaxfeat"
        lacks = "has none" if kind == "none" else "is a control, without labels"
        raise ParameterError(
            f"`run` must have a Phase A that sees labels; {str(folder)!r} is of the "
            f"row {name!r}, which {lacks}. Train with `--attention {wanted}` and "
            "diagnose that run."
        )
    path = folder / PARTICLES
    if path.is_file() and load_run(path).reason not in (None, StopReason.CALLBACK):
        return
    if (folder / run_folder.METRICS).is_file():
        raise ParameterError(
            f"`run` must hold {PARTICLES}; {str(folder)!r} does not. A saved "
            "TextClassifier keeps its weights alone: use `coulomb train`, or "
            "coulomb.text.train_in_folder."
        )
    raise ParameterError(
        f"`run` must be over with Phase A; {str(folder)!r} is not. Go on with `coulomb "
        f"train --resume {folder}`."
    )


def _set_up(folder: Path, config: Config, corpus: Corpus | None) -> Setup:
    """Draw and tokenise again what the run began with, and give it its weights."""
    corpus = run_folder.load_corpus(folder, config, corpus)
    setup = set_up(corpus, config.settings, run_folder.load_vocabulary(folder))
    weights, _ = read_tensors(folder / START)
    run_folder.check_tensors(folder / START, weights, setup.scratch.state_dict())
    setup.scratch.load_state_dict(weights)
    return setup


def _read_alignment(folder: Path, setup: Setup) -> AlignmentResult:
    """Take up the end of Phase A, without a step and without writing."""
    path = folder / PARTICLES
    asked = alignment_problem(setup)
    if "align.seed" not in read_tensors(path)[0]:
        raise FileFormatError(f"{path} is damaged: it does not say what moved it.")
    last = load_run(path).state.step
    asked["settings"] = asked["settings"].changed({"max_steps": last})
    try:
        result = align(setup.scratch, **asked, resume=path, progress=False)
    except ParameterError as error:
        raise FileFormatError(f"{path} does not fit {CONFIG}: {error}") from error
    problem = result.problem
    if problem.held_out is None:
        raise ParameterError(
            "`run` must have at least two batches, to judge Phase A by texts it did "
            f"not see; {str(folder)!r} has {len(asked['batches'])}. Train again with "
            "a smaller `--batch-size`."
        )
    with torch.no_grad():
        found = -float(problem.held_out.energy(result.run.particles))
    told = result.history[-1].get("held_out")
    if told is None or not math.isclose(found, told, rel_tol=_SAME, abs_tol=1e-6):
        raise FileFormatError(
            f"{folder} does not give its own Phase A again: the alignment of held-out "
            f"texts at its end is {found:.4g}, and was {told}. Another version of the "
            "library trained it, or a file was exchanged; train again."
        )
    return result
