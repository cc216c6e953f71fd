"""The comparison on fresh tables: `python benchmarks/tabular.py --fresh --out DIR`.

Every table of `tables.FRESH` is split once, at most 4000 rows for training and 4000 for
the test. The features of every method go to the same ridge regression or ridge
classifier, whose penalty leave-one-out chooses; RBFSampler and Nystroem choose gamma on
three tenths of the training rows. Scores are points of accuracy or R^2, p-values are
Wilcoxon's, paired over tables. *control* keeps norms, sparsity and phases of the
learned features and draws their directions anew; *alignment* is the same sampler moved
by the paper's energy; *shuffled* has learned from labels in a random order.
"""

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from coulomb import CoulombSampler
from coulomb._support.archive import write_whole
from tables import FRESH, load

BUDGETS = (64, 256, 32, 1024)
MOST_ROWS = 4000
PENALTIES = np.logspace(-4, 4, 17)
SCALES = np.logspace(-1.5, 1.5, 7)  # times 1 / columns
LEARNED = "learned"
OURS = ("control", "alignment", "shuffled")
RIVALS = ("RBFSampler, tuned", "Nystroem, tuned")
TREES = ("HistGradientBoosting", "LightGBM")


class Split:
    """Training and test rows of one table."""

    def __init__(self, name: str) -> None:
        rows = load(name)
        order = np.random.default_rng(0).permutation(len(rows.y))
        count = min(MOST_ROWS, int(0.75 * len(order)))
        train, test = order[:count], order[count : count + MOST_ROWS]
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
    if n_components == 0:
        kinds = (
            (HistGradientBoostingClassifier, LGBMClassifier)
            if split.classes
            else (HistGradientBoostingRegressor, LGBMRegressor)
        )
        for title, kind in zip(TREES, kinds, strict=True):
            options = {"verbose": -1, "n_jobs": 1} if title == "LightGBM" else {}
            model = kind(random_state=0, **options)
            _, seconds[title] = cpu(lambda m=model: m.fit(split.X, split.y))
            scores[title] = 100 * float(model.score(split.new, split.truth))
        return record | {"scores": scores, "seconds": seconds}
    target = "classes" if split.classes else "number"
    options = {"n_components": n_components, "target": target, "random_state": 0}
    learned, seconds[LEARNED] = cpu(
        lambda: CoulombSampler(**options).fit(split.X, split.y)
    )
    mixed = np.random.default_rng(2).permutation(split.y)
    made = {
        LEARNED: learned,
        "control": learned.control(0),
        "alignment": CoulombSampler(objective="alignment", **options).fit(
            split.X, split.y
        ),
        "shuffled": CoulombSampler(**options).fit(split.X, mixed),
    }
    for title, sampler in made.items():
        scores[title] = split.score(sampler.transform, split.X, split.new)
    for title, kind in zip(RIVALS, (RBFSampler, Nystroem), strict=True):
        transform = split.tuned(kind, n_components).transform
        scores[title] = split.score(transform, split.Z, split.new_Z)
    record["steps"], record["pursued"] = learned.n_iter_, learned.n_pursued_
    record["scaled"] = bool(learned.scaled_)
    return record | {"scores": scores, "seconds": seconds}


def run(out: Path) -> None:
    """Evaluate what is not there yet; each table is written when it is done."""
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", category=UserWarning)
    CoulombSampler(8).fit(np.eye(60), np.arange(60) % 2)  # compile what is compiled
    for n_components in (0, *BUDGETS):
        for name in FRESH:
            path = out / f"{name}-{n_components}.json"
            if not path.exists():
                text = json.dumps(evaluate(name, n_components))
                write_whole(path, lambda p, t=text: p.write_text(t))
                print(path.stem, text, flush=True)


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
    ratios = [
        r["seconds"][LEARNED] / trees[r["set"]]["seconds"][TREES[0]]
        for r in found
        if r["set"] in trees
    ]
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
