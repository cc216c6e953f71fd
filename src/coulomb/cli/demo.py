"""`coulomb demo`: fixed against learned features in under a minute."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from typer import Argument, Option

from coulomb._support.progress import progress_bar
from coulomb.cli.output import Seed, check_outputs, print_table, say

_COMPONENTS = {"synthetic": 200, "breast cancer": 64, "digits": 64}
_FEATURES = ("raw", "fixed", "control", "learned")


def new(folder: Path = Argument(help="New folder to write.")) -> None:
    """Write a folder to start from: settings, a small CSV file and a script.

    **Examples**

    `coulomb new reviews`
    """
    from coulomb._support.archive import write_folder
    from coulomb.text.settings import preset, to_toml

    check_outputs(folder=folder)
    starter = files("coulomb.cli").joinpath("starter")
    changes = {"width": 32, "n_features": 32, "epochs": 10, "min_steps": 0}

    def write(place: Path) -> None:
        for part in starter.iterdir():
            name = part.name.removesuffix(".txt")
            (place / name).write_bytes(part.read_bytes())
        settings = to_toml(preset("default", changes | {"batch_size": 16, "lr": 5e-3}))
        (place / "settings.toml").write_text(settings, "utf-8")

    write_folder(folder, write)
    say(f"Written: {folder}. Go there, and run `python train.py`, or")
    train = "coulomb train reviews.csv --text review --label sentiment"
    say(f"{train} --config settings.toml")


def demo(
    out: Path = Option(
        Path("coulomb-demo"), help="Folder for the picture and the table."
    ),
    trials: int = Option(5, min=2, max=10_000, help="Repetitions of each."),
    seed: Seed = 0,
) -> None:
    """Compare fixed and learned random features on three problems.

    The paper's synthetic problem, and two real data sets that come with scikit-learn
    (breast cancer, digits). Every learned row carries its control: features of the same
    norms and sparsity that the labels have not placed. Writes `demo.png` (particles,
    energy and kernel before and after) and `demo.json`.

    **Examples**

    `coulomb demo`

    `coulomb demo --trials 10 --seed 1 --out /tmp/demo`
    """
    import numpy as np

    from coulomb._support.archive import plain, write_json
    from coulomb.report.demo import draw_demo

    picture, table = out / "demo.png", out / "demo.json"
    check_outputs(picture, table, folder=out)
    rows = []
    with progress_bar("learning features", trials * len(_COMPONENTS) + 1) as advance:
        for name, n_components in _COMPONENTS.items():
            scores = []
            for trial in range(trials):
                scores.append(_compare(name, seed + trial))
                advance(note=name)
            accuracies = dict(zip(_FEATURES, np.array(scores).T, strict=True))
            rows.append({"name": name, "n_components": n_components, **accuracies})
        draw_demo(picture, seed=seed)
        advance(note="picture")
    _print_table(rows, trials)
    write_json(table, {"rows": plain(rows)})
    say(f"Picture: {picture}")
    say(f"Table:   {table}")


def _compare(name: str, trial: int) -> list[float]:
    """Score raw columns, fixed, control and learned features on one trial."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    from coulomb.estimators import CoulombSampler

    n_components = _COMPONENTS[name]
    X, y, new, judge = _load(name, trial)
    fixed = CoulombSampler(n_components, max_iter=0, random_state=trial).fit(X, y)
    learned = CoulombSampler(n_components, random_state=trial).fit(X, y)
    control = learned.control(random_state=trial)
    pairs = [(X, new)]
    pairs += [(m.transform(X), m.transform(new)) for m in (fixed, control, learned)]
    scores = []
    for features, unseen in pairs:
        model = SVC(kernel="linear")
        if features.shape[1] == X.shape[1]:  # raw columns need a common scale
            model = make_pipeline(StandardScaler(), model)
        scores.append(judge(model.fit(features, y).predict(unseen)))
    return scores


def _load(name: str, trial: int) -> tuple[Any, Any, Any, Callable[[Any], float]]:
    """Give training data, test samples, and how to judge what is predicted of them."""
    from sklearn.datasets import load_breast_cancer, load_digits
    from sklearn.model_selection import train_test_split

    from coulomb.datasets import expected_accuracy, make_synthetic

    if name == "synthetic":
        problem = make_synthetic(noise=0.1, trial=trial)
        train, chances = problem.train, problem.probability[problem.test]
        parts = (problem.X[train], problem.y[train], problem.X[problem.test])
        return *parts, lambda predicted: float(expected_accuracy(predicted, chances))
    X, y = (load_digits if name == "digits" else load_breast_cancer)(return_X_y=True)
    split = {"test_size": 0.3, "random_state": trial, "stratify": y}
    X, new, y, truth = train_test_split(X, y, **split)
    return X, y, new, lambda predicted: float((predicted == truth).mean())


def _print_table(rows: list[dict[str, Any]], trials: int) -> None:
    print_table(
        f"Accuracy of a linear classifier, mean over {trials} paired trials",
        ("problem", "D", "raw columns", "fixed", "control", "learned",
         "learned - fixed", "learned - control"),
        [
            (
                row["name"],
                str(row["n_components"]),
                *(f"{row[name].mean():.3f}" for name in _FEATURES[:-1]),
                (f"{row['learned'].mean():.3f}", "bold"),
                _difference(row["learned"] - row["fixed"]),
                _difference(row["learned"] - row["control"]),
            )
            for row in rows
        ],
        caption="control: the norms and sparsity of the learned features, not placed "
        "by the labels; ± one standard error",
    )  # fmt: skip


def _difference(values: Any) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.3f} ± {error:.3f}"
