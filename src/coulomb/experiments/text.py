"""The paper's tables of text classification: 18 rows, their controls, bags of words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coulomb._support.checks import make_generator
from coulomb._support.errors import ParameterError
from coulomb.attention.align.diagnosis import label_cosines
from coulomb.experiments.base import (
    AbstractExperiment,
    Clock,
    Outcome,
    Settings,
    experiments,
)
from coulomb.experiments.records import PLANS, Job
from coulomb.experiments.summary import without_phase_a
from coulomb.text.data import Corpus, build_corpus
from coulomb.text.evaluate import KINDS, bag_of_words_baseline
from coulomb.text.settings import PAPER_ROWS, SETTINGS, TextSettings, preset
from coulomb.text.tasks import TASKS, load_task
from coulomb.text.tokens import Vocabulary, choose_vocabulary
from coulomb.text.training import train

TOY = "toy"  # a made-up task, so that the plan can be tried without data
LABEL_BLINDNESS = "label-blindness"
_PRESETS: dict[str, str] = PLANS["text"]["presets"]
BOTH = ("paper", "default")
_PREFIXES = {"norm-matched": "control", "noise-only": "noise"}
SMALL: Job = PLANS["text"]["small"]
_SMOKE_ROWS = ("softmax", "vanilla-softmaxfeat", "kernel-softmaxfeat")


@experiments.add("text")
class Text(AbstractExperiment):
    """Every row of the paper's three tables, with the paper's constants and with ours.

    Each Kernel row carries two controls, trained like it: particles with the norms
    Phase A gives them but not its alignment, and Phase A without the gradient of the
    alignment. Bags of words say what is there to beat. [CPM tab:sst2_detailed_metrics,
    tab:qqp_detailed_metrics, tab:rotten_tomatoes_detailed_metrics]
    """

    title = "Text classification"

    def plan(self, settings: Settings) -> list[Job]:
        if settings.preset == "smoke":
            small = {"changes": SMALL}
            return _plan(settings.tasks or (TOY,), _SMOKE_ROWS, 1, small, BOTH)
        seeds = 5 if settings.preset == "paper" else 10
        tasks = settings.tasks or ("rotten_tomatoes",)
        return _plan(tasks, PAPER_ROWS, seeds, {}, tuple(_PRESETS))

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        return run_text(job, settings)

    def constants(self, job: Job) -> Mapping[str, Any]:
        return text_constants(job)


def text_rows(rows: Sequence[str], whose: Sequence[str] = BOTH) -> list[Job]:
    """List rows with sets of constants and, for Kernel rows, both controls.

    Examples
    --------
    >>> len(text_rows(["softmax"])), len(text_rows(["kernel-elu"]))
    (2, 6)
    """
    return [
        {"method": row, "constants": constants, "control": control}
        for constants in whose
        for row in rows
        if row.startswith("kernel-")
        or row == LABEL_BLINDNESS
        or constants == without_phase_a(constants)
        for control in ((None, *_PREFIXES) if row.startswith("kernel-") else (None,))
    ]


def run_text(job: Job, settings: Settings) -> list[Outcome]:
    """Train and score one row on one seed."""
    clock = Clock()
    corpus, vocabulary = load_corpus(job["task"], settings.data_dir)
    seconds: dict[str, float] = {}
    extra: dict[str, Any] = {"notes": list(corpus.notes)}
    split = corpus.reported_on
    if job["method"] in KINDS:
        metrics: dict[str, Any] = dict(bag_of_words_baseline(corpus, job["method"]))
    elif job["method"] == LABEL_BLINDNESS:
        metrics, split = measure_blindness(job, corpus, vocabulary), "train"
    else:
        trained = train(corpus, text_settings(job), vocabulary, progress=False)
        found = trained.metrics
        metrics = found["metrics"] | {"best_epoch": found["best_epoch"]}
        metrics["validation_accuracy"] = found["chosen_by"]["validation"]
        seconds |= found["seconds"]
        extra["history"] = [_plain(line) for line in trained.history]
    seconds |= clock.seconds()
    return [Outcome(only_numbers(metrics), seconds, split, job["control"], extra)]


def only_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Leave out metrics that are undefined, or no numbers."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def text_settings(job: Job) -> TextSettings:
    """Resolve the settings of a row: preset, row or control, seed, changes.

    Examples
    --------
    >>> row = {"method": "kernel-elu", "constants": "paper", "control": "noise-only"}
    >>> text_settings(row | {"seed": 3}).attention
    'noise-elu'
    """
    attention = job["method"]
    if job["control"]:
        attention = attention.replace("kernel", _PREFIXES[job["control"]], 1)
    changes = {"attention": attention, "seed": job["seed"]} | job.get("changes", {})
    return preset(_PRESETS[job["constants"]], changes)


def text_constants(job: Job) -> dict[str, Any]:
    """Write out the settings of a row, if it is trained.

    Examples
    --------
    >>> row = {"method": "softmax", "constants": "paper", "control": None, "seed": 0}
    >>> text_constants(row)["lr"]
    0.0002
    """
    return {} if job["method"] in KINDS else by_flag(text_settings(_row(job)))


def by_flag(settings: TextSettings) -> dict[str, Any]:
    """Write out settings by the names of their flags, as keys of jobs hold them."""
    names = [name for name in SETTINGS if name not in _OF_PRETRAINED]
    return {name: getattr(settings, name) for name in names}


# No experiment sets these, and keys of earlier versions do not hold them.
_OF_PRETRAINED = ("encoder", "linearise", "tune", "window")


def thinned(corpus: Corpus, rows: Mapping[str, int]) -> Corpus:
    """Draw some rows of the splits that have more, the same ones every time."""
    splits, notes = dict(corpus.splits), corpus.notes
    for number, (name, count) in enumerate(rows.items()):
        whole = corpus.split(name)
        if count < len(whole):
            generator = make_generator(0, number)
            order = torch.randperm(len(whole), generator=generator)
            splits[name] = whole.take(order[:count].tolist())
            notes += (f"{count} of {len(whole)} rows of {name!r}, drawn at random.",)
    return replace(corpus, splits=splits, notes=notes)


@lru_cache(maxsize=2)
def load_corpus(task: str, data_dir: Path | None) -> tuple[Corpus, Vocabulary]:
    """Load a task and its vocabulary once per process."""
    corpus = _toy() if task == TOY else load_task(task, data_dir)
    if corpus.kind != "sequence":
        known = [name for name, each in TASKS.items() if each.kind == "sequence"]
        raise ParameterError(
            f"`task` must have one label per text; got {task!r}. Known: "
            f"{', '.join(known)}."
        )
    corpus = thinned(corpus, PLANS["text"]["rows"].get(task, {}))
    return corpus, choose_vocabulary(corpus, preset("default"), folder=data_dir)


def measure_blindness(
    job: Job, corpus: Corpus, vocabulary: Vocabulary
) -> dict[str, float]:
    """Compare the gradient of Phase A under true and under shuffled labels."""
    from coulomb.attention.align.problem import build_problem
    from coulomb.features import Particles
    from coulomb.text.align import alignment_problem
    from coulomb.text.setup import set_up

    setup = set_up(corpus, text_settings(_row(job)), vocabulary)
    chosen = alignment_problem(setup)
    chosen |= {"batches": chosen["batches"][:20], "seed": job["seed"]}
    problem = build_problem(setup.model, **chosen)
    positions = problem.network.layers.read(setup.model)
    inside = chosen["settings"].domain.project(positions)
    cosines = label_cosines(problem.objective, Particles(inside))
    return {"cosine": float(cosines.mean()), "largest_cosine": float(cosines.max())}


def _row(job: Job) -> Job:
    blind = job["method"] == LABEL_BLINDNESS
    return job | {"method": "kernel-softmaxfeat"} if blind else job


def text_jobs(task: str, seeds: int, rows: Sequence[Job], **more: Any) -> list[Job]:
    """Complete rows to jobs on a task, seed after seed.

    Examples
    --------
    >>> text_jobs("toy", 1, [{"method": "softmax"}])
    [{'task': 'toy', 'method': 'softmax', 'seed': 0, 'trial': 0}]
    """
    return [
        {"task": task, **row, "seed": seed, "trial": seed, **more}
        for seed in range(seeds)
        for row in rows
    ]


def _plan(
    tasks: Sequence[str], rows: Sequence[str], seeds: int, more: Job, whose: Any
) -> list[Job]:
    drawn = text_rows(rows, whose) + text_rows((LABEL_BLINDNESS,), whose)
    bags = text_rows(tuple(KINDS), ("default",))
    return [
        job
        for task in tasks
        for job in text_jobs(task, seeds, drawn, **more) + text_jobs(task, 1, bags)
    ]


def _toy() -> Corpus:
    rng = np.random.default_rng(0)
    words = {
        "+": ["good", "fine", "great", "warm"],
        "-": ["bad", "dull", "poor", "cold"],
    }
    fillers = ["film", "plot", "cast", "scene", "score", "story"]
    texts, labels = [], []
    for label in ["+", "-"] * 60:
        chosen = [*rng.choice(fillers, 4), rng.choice(words[label])]
        texts.append(" ".join(rng.permutation(chosen)))
        labels.append(label)
    return build_corpus(
        TOY,
        (texts[:80], labels[:80]),
        validation=(texts[80:100], labels[80:100]),
        test=(texts[100:], labels[100:]),
    )


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    """Keep numbers and words, but no speed: records do not depend on the machine."""
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float | str) and name != "tokens_per_second"
    }
