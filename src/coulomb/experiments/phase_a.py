"""Does Phase A learn? Learned particles against every control, paired by seed."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from coulomb._support.errors import unknown_name
from coulomb._support.stats import paired_p_value
from coulomb.experiments.base import (
    AbstractExperiment,
    Clock,
    Outcome,
    Settings,
    experiments,
)
from coulomb.experiments.records import PLANS, Job, Record
from coulomb.experiments.summary import METHOD_TITLES, paired, select
from coulomb.experiments.text import (
    SMALL,
    TOY,
    by_flag,
    load_corpus,
    only_numbers,
    text_jobs,
    thinned,
)
from coulomb.text.data import Corpus
from coulomb.text.evaluate import judged_by
from coulomb.text.settings import TextSettings, preset
from coulomb.text.tasks import TASKS, load_task
from coulomb.text.tokens import Vocabulary, choose_vocabulary
from coulomb.text.training import train

# Particles of each head, those that matter most first.
BUDGETS = (32, 256, 16, 64)
_PLAN: dict[str, Any] = PLANS["phase-a"]
ROWS: dict[str, dict[str, int]] = _PLAN["rows"]
# A task at another length has a name of its own.
LONGER = {"imdb-1024": "imdb"}
CHANGES: dict[str, Job] = _PLAN["changes"]
CONTROLS = (
    ("vanilla", None),
    ("learned", "norm-matched"),
    ("placed", None),
    ("learned", "noise-only"),
)
# These are for tags: what else could have chosen the windows.
WINDOWS = (("strewn", None), ("by-hand", None))


@experiments.add("phase-a")
class PhaseA(AbstractExperiment):
    """Learned particles, their controls and what needs no particles, for few and many.

    The score is the accuracy, or the entity F1 of a tagging task, on the test split of
    the task; the checkpoint is chosen on validation rows.
    """

    title = "Does Phase A learn?"

    def plan(self, settings: Settings) -> list[Job]:
        if settings.preset == "smoke":
            tasks = settings.tasks or (TOY,)
            own = ("n_features", "align_epochs")  # what an arm sets itself
            changes = {name: SMALL[name] for name in SMALL if name not in own}
            return _plan(tasks, (4, 8), 2, changes)
        seeds = 5 if settings.preset == "paper" else 10
        tasks = settings.tasks or ("conll2003", "qqp", "rotten_tomatoes", "mrpc")
        return _plan(tasks, BUDGETS, seeds, {})

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        clock = Clock()
        corpus, vocabulary = load_rows(job["task"], settings.data_dir)
        trained = train(corpus, arm_settings(job), vocabulary, progress=False)
        found = trained.metrics
        numbers = only_numbers(found["metrics"])
        numbers["score"] = numbers[judged_by(corpus.kind, corpus.classes)]
        numbers["validation_score"] = found["chosen_by"]["validation"]
        seconds = found["seconds"] | clock.seconds()
        extra = {
            "rows": {name: len(corpus.split(name)) for name in corpus.splits},
            "notes": list(corpus.notes),
            "alignment": found["alignment"],
        }
        return [Outcome(numbers, seconds, corpus.reported_on, job["control"], extra)]

    def constants(self, job: Job) -> Mapping[str, Any]:
        return by_flag(arm_settings(job))


def arm_settings(job: Mapping[str, Any]) -> TextSettings:
    """Resolve the settings of an arm.

    Examples
    --------
    >>> arm = {"method": "learned", "control": "noise-only", "n_components": 32}
    >>> arm_settings(arm | {"changes": {}, "seed": 1}).attention
    'noise-softmaxfeat'
    """
    method, control = job["method"], job["control"]
    attention = _PLAN["arms"][f"{method}, {control}" if control else method]
    # The arms are compared by the weights themselves.
    own = _PLAN["arm_changes"].get(method, {})
    changes = {"average_epochs": 0.0} | job["changes"] | own
    changes |= {"attention": attention, "seed": job["seed"]}
    if job["n_components"]:
        changes["n_features"] = job["n_components"]
    return preset("default", changes)


def compare_arms(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Compare learned particles with each arm they must beat, seed by seed."""
    found = []
    tasks = dict.fromkeys(record.job["task"] for record in records)
    for task in tasks:
        here = select(records, task=task)
        budgets = sorted({r.job["n_components"] for r in here if r.job["n_components"]})
        for budget in budgets:
            for method in ("learned", "neighbours"):
                ours = select(here, method=method, control=None, n_components=budget)
                row = {"task": task, "method": method, "n_components": budget}
                for name, theirs in _others(here, method, budget, budgets[-1]).items():
                    gap = paired(ours, theirs, "score", match=())
                    p_value = {"p_value": paired_p_value(gap)}
                    found.append(row | {"against": name} | gap._asdict() | p_value)
    return [row for row in found if row["n"]]


def _others(
    records: Sequence[Record], ours: str, budget: int, most: int
) -> dict[str, Sequence[Record]]:
    """Name the arms that a learned one is held against."""
    found: dict[str, Sequence[Record]] = {}
    for method, control in CONTROLS + WINDOWS:
        wanted = {"method": ours if control else method, "control": control}
        name = control or METHOD_TITLES.get(method, method)
        found[name] = select(records, n_components=budget, **wanted)
    for method in ("averaging", "softmax"):
        found[method] = select(records, method=method, control=None)
    if budget != most:
        found[f"vanilla, {most}"] = select(records, method="vanilla", n_components=most)
    return found


def _plan(
    tasks: Sequence[str], budgets: Sequence[int], seeds: int, changes: Job
) -> list[Job]:
    """Order jobs so that what is done first is of use alone."""
    arms: list[tuple[str, str | None, int | None]] = []
    arms += [(*arm, m) for m in budgets for arm in (("learned", None), *CONTROLS)]
    # These have no particles, or none that count.
    arms += [("averaging", None, None), ("softmax", None, None)]
    tag_arms = (*WINDOWS, ("neighbours", None), ("neighbours", "norm-matched"))
    of_tags = [(*arm, m) for m in budgets for arm in tag_arms]
    jobs = []
    for task in tasks:
        has_tags = task in TASKS and TASKS[task].kind == "token"
        rows = [
            {"method": method, "constants": "default"}
            | {"control": control, "n_components": budget}
            for method, control, budget in arms + (of_tags if has_tags else [])
        ]
        jobs += text_jobs(task, seeds, rows, changes=CHANGES.get(task, {}) | changes)
    return jobs


@lru_cache(maxsize=1)
def load_rows(task: str, data_dir: Path | None) -> tuple[Corpus, Vocabulary]:
    """Load a task, thinned as `ROWS` says, and its vocabulary, once per process."""
    if task == TOY:
        return load_corpus(TOY, data_dir)
    task = LONGER.get(task, task)
    if task not in TASKS:
        raise unknown_name("task", task, TASKS)
    # The split that metrics are reported on must not choose the checkpoint.
    share = 0.1 if TASKS[task].reported_on == "validation" else None
    corpus = load_task(task, data_dir, validation_share=share)
    corpus = thinned(corpus, ROWS.get(task, {}))
    return corpus, choose_vocabulary(corpus, preset("default"), folder=data_dir)
