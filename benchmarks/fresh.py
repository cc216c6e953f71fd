"""The comparison on fresh tables: `python benchmarks/tabular.py --fresh --out DIR`.

Every table of `tables.FRESH` is split once, at most 2000 rows for training and 4000 for
the test. The features of every method go to the same ridge regression or ridge
classifier, whose penalty leave-one-out chooses; RBFSampler and Nystroem choose gamma on
three tenths of the training rows. Scores are points of accuracy or R^2, p-values are
Wilcoxon's, paired over tables. *control* keeps norms, sparsity and phases of the
learned features and draws their directions anew, and is the mean of three draws;
*shuffled* has learned from labels in a random order. CPU times are of one thread, and
HistGradientBoosting is fitted beside every fit of ours.

`python benchmarks/tabular.py --time` compares CPU times of fits with trees'.
`python benchmarks/tabular.py --ablation --out DIR` leaves parts of a fit out, or adds
noise, on three splits of the tables of `tables.DEVELOPMENT`.
"""

import contextlib
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from lightgbm import LGBMClassifier, LGBMRegressor
from scipy.stats import wilcoxon
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import RidgeClassifierCV, RidgeCV
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from coulomb import CoulombSampler
from coulomb._support.archive import write_whole
from coulomb.dynamics.langevin import AdamLangevin
from coulomb.estimators import coulomb as estimator
from coulomb.estimators import learning
from coulomb.objectives import Evidence
from tables import DEVELOPMENT, FRESH, load

BUDGETS = (64, 256, 32, 1024)
MOST_ROWS, MOST_TEST_ROWS = 2000, 4000
CONTROLS = 3
SPLITS = 3  # of a table, in the ablation
PENALTIES = np.logspace(-4, 4, 17)
SCALES = np.logspace(-1.5, 1.5, 7)  # times 1 / columns
LEARNED = "learned"
OURS = ("control", "shuffled")
RIVALS = ("RBFSampler, tuned", "Nystroem, tuned")
TREES = ("HistGradientBoosting", "LightGBM")


class Split:
    """Training and test rows of one table."""

    def __init__(self, name: str, seed: int = 0) -> None:
        rows = load(name)
        order = np.random.default_rng(seed).permutation(len(rows.y))
        count = min(MOST_ROWS, int(0.75 * len(order)))
        train, test = order[:count], order[count:][:MOST_TEST_ROWS]
        self.classes = rows.classes
        self.X, self.y = rows.X[train], rows.y[train]
        self.new, self.truth = rows.X[test], rows.y[test]
        scaler = StandardScaler().fit(self.X)
        self.Z, self.new_Z = scaler.transform(self.X), scaler.transform(self.new)

    def head(self) -> Any:
        return (RidgeClassifierCV if self.classes else RidgeCV)(alphas=PENALTIES)

    def score(
        self, transform: Callable[[np.ndarray], np.ndarray], X: Any, new: Any
    ) -> float:
        model = self.head().fit(transform(X), self.y)
        return 100 * float(model.score(transform(new), self.truth))

    def control(self, learned: CoulombSampler) -> float:
        """Score features with the same norms and other directions."""
        twins = [learned.control(seed) for seed in range(CONTROLS)]
        found = [self.score(twin.transform, self.X, self.new) for twin in twins]
        return float(np.mean(found))

    def tuned(self, kind: Any, n_components: int) -> Any:
        """Choose gamma on rows held out from training."""
        order = np.random.default_rng(1).permutation(len(self.y))
        inner, outer = np.split(order, [7 * len(order) // 10])
        best = (-np.inf, 1.0)
        for scale in SCALES / self.Z.shape[1]:
            count = min(n_components, len(inner) - 1)
            made = kind(gamma=scale, n_components=count, random_state=0)
            features = made.fit_transform(self.Z[inner])
            model = self.head().fit(features, self.y[inner])
            score = model.score(made.transform(self.Z[outer]), self.y[outer])
            best = max(best, (score, scale))
        count = min(n_components, len(order) - 1)
        made = kind(gamma=best[1], n_components=count, random_state=0)
        return made.fit(self.Z)


def cpu(run: Callable[[], Any]) -> tuple[Any, float]:
    """Run something and tell its CPU time."""
    start = time.process_time()
    found = run()
    return found, time.process_time() - start


def evaluate(name: str, n_components: int) -> dict[str, Any]:
    """Score every method on one table at one number of features (0: the trees)."""
    split = Split(name)
    scores: dict[str, float] = {}
    seconds: dict[str, float] = {}
    record = {"set": name, "n_components": n_components, "classes": split.classes}
    kinds = (
        (HistGradientBoostingClassifier, LGBMClassifier)
        if split.classes
        else (HistGradientBoostingRegressor, LGBMRegressor)
    )
    for title, kind in zip(TREES[: 2 if n_components == 0 else 1], kinds, strict=False):
        options = {"verbose": -1, "n_jobs": 1} if title == "LightGBM" else {}
        model = kind(random_state=0, **options)
        _, seconds[title] = cpu(lambda m=model: m.fit(split.X, split.y))
        scores[title] = 100 * float(model.score(split.new, split.truth))
    if n_components == 0:
        return record | {"scores": scores, "seconds": seconds}
    target = "classes" if split.classes else "number"
    options = {"n_components": n_components, "target": target, "random_state": 0}
    learned, seconds[LEARNED] = cpu(
        lambda: CoulombSampler(**options).fit(split.X, split.y)
    )
    mixed = np.random.default_rng(2).permutation(split.y)
    shuffled = CoulombSampler(**options).fit(split.X, mixed)
    for title, sampler in ((LEARNED, learned), ("shuffled", shuffled)):
        scores[title] = split.score(sampler.transform, split.X, split.new)
    scores["control"] = split.control(learned)
    for title, kind in zip(RIVALS, (RBFSampler, Nystroem), strict=True):
        transform = split.tuned(kind, n_components).transform
        scores[title] = split.score(transform, split.Z, split.new_Z)
    record["steps"], record["pursued"] = learned.n_iter_, learned.n_pursued_
    record["scaled"], record["law"] = bool(learned.scaled_), learned.law_
    return record | {"scores": scores, "seconds": seconds}


def timing() -> str:
    """Tell CPU times of `fit` over those of HistGradientBoosting, and on more rows."""
    tables: dict[int, list[float]] = {64: [], 256: [], 1024: []}
    lines = []
    with threadpool_limits(limits=1):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(10**6, 20))
        y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + rng.normal(size=len(X)) > 0
        CoulombSampler(32, random_state=0).fit(X[:500], y[:500])  # compiles the loops
        HistGradientBoostingClassifier().fit(X[:500], y[:500])
        for name in DEVELOPMENT:
            table = load(name)
            rows = np.random.default_rng(0).permutation(len(table.y))[:4000]
            data = np.nan_to_num(table.X[rows]), table.y[rows]
            for count, ratios in tables.items():
                ratios.append(_over_trees(data, count, classes=table.classes))
        for count, ratios in tables.items():
            lines.append(
                f"D = {count}, {len(ratios)} development tables: median "
                f"{np.median(ratios):.2f}, from {min(ratios):.1f} to {max(ratios):.1f}"
            )
        for n, count in ((1000, 256), (10**5, 256), (10**6, 256), (10**4, 4096)):
            ratio = _over_trees((X[:n], y[:n]), count, classes=True)
            lines.append(f"D = {count}, {n:,} drawn rows of 20 columns: {ratio:.2f}")
    return "\n".join(lines)


def _over_trees(data: tuple[Any, Any], count: int, *, classes: bool) -> float:
    target = "classes" if classes else "number"
    ours = CoulombSampler(count, target=target, random_state=0)
    trees = (
        HistGradientBoostingClassifier() if classes else HistGradientBoostingRegressor()
    )
    seconds = [cpu(lambda m=model: m.fit(*data))[1] for model in (trees, ours, trees)]
    return seconds[1] / min(seconds[0], seconds[2])


def run(out: Path) -> None:
    """Evaluate what is not there yet; each table is written when it is done."""
    for n_components in (0, *BUDGETS):
        for name in FRESH:
            once(out / f"{name}-{n_components}.json", evaluate, name, n_components)


def once(path: Path, work: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Write the record of some work unless it is there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", category=UserWarning)
    text = json.dumps(work(*arguments))
    write_whole(path, lambda p: p.write_text(text))
    print(path.stem, text, flush=True)


@contextlib.contextmanager
def without(method: str) -> Iterator[None]:
    """Leave a phase of the fit out."""
    with mock.patch.object(learning._Path, method, return_value=()):
        yield


@contextlib.contextmanager
def with_noise() -> Iterator[None]:
    """Let particles, not shared scales, move with the noise of a batch's posterior."""

    def noisy(step_size: float, **options: Any) -> AdamLangevin:
        count = len(options["domain"].mask)
        # The law is exp(-beta N H), and H is minus the log evidence of a row.
        beta = options["batch_size"] / count if count > 1 else np.inf
        return AdamLangevin(step_size, inverse_temperature=beta, **options)

    with mock.patch.object(learning, "AdamLangevin", noisy):
        yield


ABLATIONS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "everything": (contextlib.nullcontext, {}),
    "bending left out": (partial(without, "bent"), {}),
    "scales left out": (partial(without, "scaled"), {}),
    "pursuit left out": (contextlib.nullcontext, {"pursuit": 0}),
    "particles do not move": (partial(without, "moved"), {}),
    "noise added": (with_noise, {}),
    "determinant left out": (
        lambda: mock.patch.object(
            estimator, "Evidence", partial(Evidence, determinant=0.0)
        ),
        {},
    ),
    "repulsion left out": (contextlib.nullcontext, {"interaction_strength": 0.0}),
}


def ablated(name: str, seed: int, n_components: int, part: str) -> dict[str, Any]:
    """Score features that were learned without a part."""
    split = Split(name, seed)
    change, options = ABLATIONS[part]
    target = "classes" if split.classes else "number"
    sampler = CoulombSampler(n_components, target=target, random_state=seed, **options)
    with change():
        _, seconds = cpu(lambda: sampler.fit(split.X, split.y))
    score = split.score(sampler.transform, split.X, split.new)
    record = {"set": name, "split": seed, "n_components": n_components, "part": part}
    return record | {"score": score, "seconds": seconds, "steps": sampler.n_iter_}


def ablation(out: Path) -> str:
    """Run what is not there yet, and write the differences."""
    for seed in range(SPLITS):
        for n_components in (256, 64):
            for name in DEVELOPMENT:
                for part in ABLATIONS:
                    job = name, seed, n_components, part
                    title = "-".join(map(str, job)).replace(" ", "-")
                    once(out / f"{title}.json", ablated, *job)
    return ablation_table(out)


def ablation_table(out: Path) -> str:
    """Write differences from everything, means of the splits that are there."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    keys = "set", "split", "n_components", "part"
    scores = {tuple(r[key] for key in keys): r["score"] for r in records}
    lines = ["| | D = 64 | D = 256 |", "| --- | ---: | ---: |"]
    for part in list(ABLATIONS)[1:]:
        cells = []
        for n_components in (64, 256):
            gaps = defaultdict(list)
            for (name, seed, count, changed), score in scores.items():
                whole = scores.get((name, seed, n_components, "everything"))
                if (count, changed) == (n_components, part) and whole is not None:
                    gaps[name].append(score - whole)
            means = np.array([np.mean(gap) for gap in gaps.values()])
            cells.append(f"{mean_and_error(means)} ({len(means)})")
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown(out: Path) -> str:
    """Write differences, learned minus each method, from what is there."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    trees = {r["set"]: r for r in records if r["n_components"] == 0}
    lines = []
    for n_components in sorted(BUDGETS):
        found = [r for r in records if r["n_components"] == n_components]
        if len(found) < 2:
            continue
        lines += [f"## D = {n_components}", "", *compared(found, trees)]
    return "\n".join(lines) + "\n"


def compared(found: list[dict[str, Any]], trees: dict[str, Any]) -> list[str]:
    lines = [
        f"{len(found)} tables. Points, ± one standard error over tables.",
        "",
        "| learned minus | classification | regression | all | win/loss | worst | p |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in (*OURS, *RIVALS, *TREES):
        gaps = {True: [], False: []}
        for record in found:
            other = trees[record["set"]] if method in TREES else record
            gap = record["scores"][LEARNED] - other["scores"][method]
            gaps[record["classes"]].append(gap)
        both = np.array(gaps[True] + gaps[False])
        cells = [mean_and_error(np.array(g)) for g in (gaps[True], gaps[False], both)]
        wins, losses = int((both > 0.1).sum()), int((both < -0.1).sum())
        p = wilcoxon(both).pvalue if both.any() else 1.0
        lines.append(
            f"| {method} | {' | '.join(cells)} | {wins}/{losses} | {both.min():+.1f} | "
            f"{p:.2g} |"
        )
    ratios = [r["seconds"][LEARNED] / r["seconds"][TREES[0]] for r in found]
    moved = np.mean([r["steps"] > 0 or r["scaled"] for r in found])
    pursued = np.mean([r["pursued"] > 0 for r in found])
    return [
        *lines,
        "",
        "CPU time of `fit` over HistGradientBoosting's: median "
        f"{np.median(ratios):.1f}. Folds let scales or particles move on "
        f"{100 * moved:.0f} % of the tables, and features be pursued on "
        f"{100 * pursued:.0f} %.",
        "",
    ]


def mean_and_error(gaps: np.ndarray) -> str:
    if len(gaps) < 2:
        return "-"
    return f"{gaps.mean():+.2f} ± {gaps.std(ddof=1) / np.sqrt(len(gaps)):.2f}"
