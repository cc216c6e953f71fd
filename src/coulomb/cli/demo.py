"""`coulomb demo`: fixed against learned features in under a minute."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from coulomb._support.progress import progress_bar
from coulomb.cli.output import print_table

if TYPE_CHECKING:
    import numpy as np


class Row(NamedTuple):
    """Accuracies of one data set over its trials, paired."""

    name: str
    n_components: int
    raw: "np.ndarray"
    fixed: "np.ndarray"
    control: "np.ndarray"
    learned: "np.ndarray"


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the picture and the table.")
    ] = Path("coulomb-demo"),
    trials: Annotated[
        int, typer.Option(min=2, help="Repetitions of each comparison.")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything drawn.")] = 0,
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

    from coulomb._support.archive import write_json
    from coulomb.report.demo import draw_demo

    problems = ("synthetic", "breast cancer", "digits")
    rows = []
    with progress_bar("learning features", trials * len(problems) + 1) as advance:
        for name in problems:
            scores = []
            for trial in range(trials):
                scores.append(_compare(name, seed + trial))
                advance(note=name)
            columns = np.array(scores).T
            rows.append(Row(name, _COMPONENTS[name], *columns))
        picture = out / "demo.png"
        draw_demo(picture, seed=seed)
        advance(note="picture")
    _print_table(rows, trials)
    write_json(out / "demo.json", {"rows": [_record(row) for row in rows]})
    typer.echo(f"Picture: {picture}")
    typer.echo(f"Table:   {out / 'demo.json'}")


_COMPONENTS = {"synthetic": 200, "breast cancer": 64, "digits": 64}


def _compare(name: str, trial: int) -> tuple[float, float, float, float]:
    """Score raw columns, fixed, control and learned features on one trial."""
    from coulomb.estimators import CoulombSampler

    n_components = _COMPONENTS[name]
    train, test, score = _load(name, trial)
    fixed = CoulombSampler(n_components, max_iter=0, random_state=trial).fit(*train)
    learned = CoulombSampler(n_components, random_state=trial).fit(*train)
    control = learned.control(random_state=trial)
    raw = score(train[0], train[1], test[0])
    return (
        raw,
        *(
            score(model.transform(train[0]), train[1], model.transform(test[0]))
            for model in (fixed, control, learned)
        ),
    )


def _load(name: str, trial: int) -> tuple[Any, Any, Any]:
    """Give training and test data, and how to score a linear classifier on them."""
    from sklearn.datasets import load_breast_cancer, load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    from coulomb.datasets import expected_accuracy, make_synthetic

    if name == "synthetic":
        problem = make_synthetic(noise=0.1, trial=trial)
        X, y, test = problem.X, problem.y, problem.test
        train = (X[problem.train], y[problem.train])

        def judge(predicted: Any) -> float:
            return float(expected_accuracy(predicted, problem.probability[test]))

        held_out = (X[test], y[test])
    else:
        load = load_digits if name == "digits" else load_breast_cancer
        X, y = load(return_X_y=True)
        parts = train_test_split(X, y, test_size=0.3, random_state=trial, stratify=y)
        train, held_out = (parts[0], parts[2]), (parts[1], parts[3])

        def judge(predicted: Any) -> float:
            return float((predicted == held_out[1]).mean())

    def score(features: Any, labels: Any, new: Any) -> float:
        model = SVC(kernel="linear")
        if features.shape[1] == train[0].shape[1]:  # raw columns need a common scale
            model = make_pipeline(StandardScaler(), model)
        return judge(model.fit(features, labels).predict(new))

    return train, held_out, score


def _record(row: Row) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str | int) else list(map(float, value))
        for name, value in row._asdict().items()
    }


def _print_table(rows: list[Row], trials: int) -> None:
    print_table(
        f"Accuracy of a linear classifier, mean over {trials} paired trials",
        ("problem", "D", "raw columns", "fixed", "control", "learned",
         "learned - fixed", "learned - control"),
        [
            (
                row.name,
                str(row.n_components),
                *(f"{v.mean():.3f}" for v in (row.raw, row.fixed, row.control)),
                (f"{row.learned.mean():.3f}", "bold"),
                _difference(row.learned - row.fixed),
                _difference(row.learned - row.control),
            )
            for row in rows
        ],
        caption="control: the norms and sparsity of the learned features, not placed "
        "by the labels; ± one standard error",
    )  # fmt: skip


def _difference(values: "np.ndarray") -> str:
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.3f} ± {error:.3f}"
