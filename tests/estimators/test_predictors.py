"""`CoulombClassifier` and `CoulombRegressor`."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import sklearn
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy.stats import norm, rankdata
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from coulomb import CoulombClassifier, CoulombRegressor, CoulombSampler
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.estimators.tabular import (
    descend,
    encode,
    encoded_names,
    fit_ridge,
    learn_columns,
    merge_rows,
    read_table,
)


@pytest.fixture(scope="module")
def table():
    """Numbers with gaps, a heavy tail, strings with gaps, and a mixed target."""
    rng = np.random.default_rng(0)
    n = 300
    frame = pd.DataFrame(
        {
            "a": rng.normal(size=n),
            "b": np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)),
            "tail": rng.standard_cauchy(n),
            "colour": pd.Categorical(rng.choice(["red", "green", "blue"], n)),
            "word": pd.Series(rng.choice(["x", "y", None], n), dtype=object),
            "flag": rng.random(n) < 0.5,
        }
    )
    score = frame.a + (frame.colour == "red") + 0.3 * rng.normal(size=n)
    return frame, score.to_numpy()


def test_reads_frames_arrow_tables_and_arrays_alike(table):
    frame, y = table
    model = CoulombRegressor(16, random_state=0).fit(frame, y)
    expected = model.predict(frame)
    arrow = pa.Table.from_pandas(frame, preserve_index=False)
    again = clone(model).fit(arrow, y)
    np.testing.assert_array_equal(again.predict(arrow), expected)
    np.testing.assert_array_equal(model.predict(arrow), expected)
    objects = frame.astype(object).to_numpy()
    from_array = clone(model).fit(objects, y)
    np.testing.assert_allclose(from_array.predict(objects), expected)


def test_one_hots_stay_zero_and_one_and_numbers_are_standardised(table):
    frame, y = table
    model = CoulombRegressor(16, random_state=0).fit(frame, y)
    z = encode(read_table(frame, list(frame), None), model.columns_)
    names = [name for _, name in encoded_names(model.columns_)]
    assert z.shape[1] == len(names)
    for name, column in zip(names, z.T, strict=True):
        if "=" in name or "missing" in name:
            assert set(np.unique(column)) == {0.0, 1.0}
        elif "ranked" not in name:
            assert abs(column.mean()) < 1e-12
            assert column.std() == pytest.approx(1.0)
    # A bent tail ends at the knee, three robust deviations, before standardising.
    assert np.abs(z[:, names.index("tail")]).max() < 6


def test_ranks_are_normal_scores_whatever_the_scale():
    """Against scipy's ranks; few different values need none."""
    x = np.random.default_rng(0).normal(size=50).round(1)
    weight = np.random.default_rng(1).integers(1, 4, size=50)
    few = np.arange(50.0) % 5
    learned = learn_columns([x, np.exp(3 * x), few], "abc", weight, 30)
    names = [name for _, name in encoded_names(learned)]
    assert names == ["a", "a, ranked", "b", "b, ranked", "c"]
    z = encode([x, np.exp(3 * x), few], learned)
    ranks = rankdata(np.repeat(x, weight)) - 0.5
    expected = norm.ppf(ranks / weight.sum())
    np.testing.assert_allclose(np.repeat(z[:, 1], weight), expected)
    np.testing.assert_array_equal(z[:, 3], z[:, 1])
    far = encode([np.array([-1e9, 1e9])] * 3, learned)
    np.testing.assert_array_equal(far[:, 1], [z[:, 1].min(), z[:, 1].max()])


def test_ranks_of_many_values_are_interpolated():
    x = np.random.default_rng(0).lognormal(size=1000)
    z = encode([x], learn_columns([x], "a", np.ones(1000), 30))
    expected = norm.ppf((rankdata(x) - 0.5) / 1000)
    inner = np.abs(expected) < 1.5  # the outer knots are far apart
    np.testing.assert_allclose(z[inner, 1], expected[inner], atol=0.05)


def test_unknown_and_rare_levels(table):
    frame, y = table
    model = CoulombRegressor(16, max_categories=2, random_state=0).fit(frame, y)
    rare = min(set(frame.colour), key=list(frame.colour).count)
    new = frame.head(3).astype({"colour": object})
    as_rare, unknown = new.copy(), new.copy()
    as_rare["colour"], unknown["colour"] = rare, "violet"
    np.testing.assert_array_equal(model.predict(as_rare), model.predict(unknown))
    column = np.array(["p", "q", "p", "r", None], dtype=object)
    learned = learn_columns([column[:4]], ["c"], np.ones(4), 30)
    new = encode([np.array(["s", None], dtype=object)], learned)
    # Nothing was rare or missing: the average row stands for both.
    np.testing.assert_array_equal(new, [[0.5, 0.25, 0.25]] * 2)


def test_numbers_can_be_marked_as_categories():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 5, size=200)
    y = np.array([3.0, -1.0, 2.0, 0.0, 5.0])[codes]
    X = np.column_stack([codes, rng.normal(size=200)])
    model = CoulombRegressor(8, categorical_features=[0], random_state=0).fit(X, y)
    assert len(encoded_names(model.columns_)) == 7
    assert model.score(X, y) > 0.999
    for wrong, words in [
        ([7], "must be below 2"),
        (["no"], "name columns"),
        ("x", "list"),
    ]:
        with pytest.raises(ParameterError, match=words):
            clone(model).set_params(categorical_features=wrong).fit(X, y)


def test_missing_values_carry_information():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(400, 2))
    gone = rng.random(400) < 0.3
    X[gone, 1] = np.nan
    model = CoulombClassifier(16, random_state=0).fit(X[:200], gone[:200])
    assert model.score(X[200:], gone[200:]) == 1.0
    # New gaps in a column that had none take the median.
    model = CoulombRegressor(16, random_state=0).fit(X[:, :1], X[:, 0])
    median = np.quantile(X[:, 0], 0.5, method="inverted_cdf")
    assert model.predict([[np.nan]]) == model.predict([[median]])


@pytest.mark.parametrize("head", ["logistic", "ridge"])
def test_weights_are_repeated_rows(head):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3))
    X[::7, 0] = np.nan
    y = np.where(X[:, 1] + X[:, 2] ** 2 > 1, "u", "v")
    weight = rng.integers(0, 4, size=120)
    model = CoulombClassifier(16, head=head, random_state=0)
    weighted = clone(model).fit(X, y, sample_weight=weight)
    repeated = np.repeat(np.arange(120), weight)
    shuffled = rng.permutation(repeated)
    plain = clone(model).fit(X[shuffled], y[shuffled])
    np.testing.assert_array_equal(weighted.predict_proba(X), plain.predict_proba(X))
    regressor = CoulombRegressor(16, random_state=0)
    a = clone(regressor).fit(X, X[:, 1] * X[:, 2], sample_weight=weight)
    b = clone(regressor).fit(X[shuffled], (X[:, 1] * X[:, 2])[shuffled])
    np.testing.assert_array_equal(a.predict(X), b.predict(X))


def test_class_weight_is_sample_weight():
    X, y = load_breast_cancer(return_X_y=True)
    weight = np.where(y == 0, 3.0, 1.0)
    by_class = CoulombClassifier(16, class_weight={0: 3.0}, random_state=0).fit(X, y)
    by_row = CoulombClassifier(16, random_state=0).fit(X, y, sample_weight=weight)
    np.testing.assert_array_equal(by_class.predict_proba(X), by_row.predict_proba(X))


@pytest.mark.parametrize("n", [12, 40])
def test_leave_one_out_is_that_of_refits(n):
    """Against scikit-learn's ridge without each row, for few rows and for many."""
    rng = np.random.default_rng(n)
    design, targets = rng.normal(size=(n, 20)), rng.normal(size=(n, 2))
    weight = rng.uniform(0.5, 2.0, size=n)
    head = fit_ridge(design, targets, weight, [0.3])
    penalty = 0.3 * weight.mean()
    for i in range(n):
        rest = np.arange(n) != i
        model = Ridge(penalty).fit(design[rest], targets[rest], weight[rest])
        np.testing.assert_allclose(head.held_out[i], model.predict(design[[i]])[0])
    full = Ridge(penalty).fit(design, targets, weight)
    np.testing.assert_allclose(head.coef, full.coef_.T)
    np.testing.assert_allclose(head.intercept, full.intercept_)
    loss = weight @ ((targets - head.held_out) ** 2).sum(axis=1) / weight.sum()
    np.testing.assert_allclose(head.losses, [loss])


@pytest.mark.parametrize("n_classes", [2, 3])
def test_descent_reaches_the_logistic_optimum(n_classes):
    """Against scikit-learn's solver, at the precision of single numbers."""
    rng = np.random.default_rng(0)
    design = rng.normal(size=(200, 5))
    y = rng.permutation(np.arange(200) % n_classes)
    y[design[:, 0] > 0.5] = 0
    targets = np.eye(n_classes)[y][:, (1 if n_classes == 2 else 0) :]
    values, vectors = np.linalg.eigh(design.T @ design)
    coef, intercept, _ = descend(
        design @ vectors,
        values,
        targets,
        np.ones((200, 1)),
        np.array([2.0]),
        steps=500,
    )
    coef, intercept = vectors @ coef[..., 0], intercept[..., 0]
    exact = LogisticRegression(C=0.5, tol=1e-10, max_iter=1000).fit(design, y)
    np.testing.assert_allclose(coef.T, exact.coef_, atol=1e-4)
    shift = intercept - exact.intercept_
    np.testing.assert_allclose(shift, shift.mean() if n_classes > 2 else 0, atol=1e-4)


@pytest.mark.parametrize("head", ["logistic", "ridge"])
def test_probabilities_are_calibrated(head):
    """Of rows with a forecast near p, a share p is of the class.

    The standard error of a share of n rows is sqrt(p (1 - p) / n); over four draws of
    the data each of five bins may miss by four of them and two points, for what 600
    rows of training leave open.
    """
    forecasts, shares = np.zeros(5), np.zeros(5)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(4600, 2))
        truth = 1 / (1 + np.exp(-2 * np.sin(2 * X[:, 0]) - X[:, 1]))
        y = rng.random(4600) < truth
        model = CoulombClassifier(64, head=head, random_state=0).fit(X[:600], y[:600])
        found = model.predict_proba(X[600:])
        np.testing.assert_allclose(found.sum(axis=1), 1.0)
        parts = np.array_split(np.argsort(found[:, 1]), 5)
        forecasts += [found[part, 1].mean() / 4 for part in parts]
        shares += [y[600:][part].mean() / 4 for part in parts]
        linear = LogisticRegression().fit(X[:600], y[:600]).predict_proba(X[600:])
        assert log_loss(y[600:], found) < log_loss(y[600:], linear)
    error = np.sqrt(forecasts * (1 - forecasts) / (4 * 800))
    assert (np.abs(forecasts - shares) < 4 * error + 0.02).all()


def test_decision_function_orders_as_probabilities():
    X, y = load_iris(return_X_y=True)
    names = np.array(["p", "q", "r"])[y]
    model = CoulombClassifier(16, random_state=0).fit(X, names)
    assert model.decision_function(X).shape == (150, 3)
    expected = model.classes_[model.predict_proba(X).argmax(axis=1)]
    np.testing.assert_array_equal(model.predict(X), expected)
    two = CoulombClassifier(16, random_state=0).fit(X[:100], names[:100])
    logit = two.decision_function(X)
    np.testing.assert_allclose(two.predict_proba(X)[:, 1], 1 / (1 + np.exp(-logit)))


def test_regressor_never_guesses_classes():
    X, _ = load_iris(return_X_y=True)
    y = np.rint(X[:, 0]).astype(int)  # few whole numbers
    model = CoulombRegressor(16, random_state=0).fit(X[:, 1:], y)
    assert model.sampler_.target == "number"
    assert len(np.unique(model.predict(X[:, 1:]))) > 20
    far = model.predict(100 * X[:, 1:])
    assert far.min() >= y.min()
    assert far.max() <= y.max()


def test_constant_targets_and_columns():
    X = np.random.default_rng(0).normal(size=(20, 2))
    assert (CoulombRegressor(8).fit(X, np.full(20, 3.0)).predict(X) == 3.0).all()
    model = CoulombRegressor(8).fit(np.ones((20, 2)), X[:, 0])
    np.testing.assert_allclose(model.predict(np.ones((1, 2))), X[:, 0].mean())
    assert not model.feature_importances_.any()


@pytest.mark.parametrize(
    "model",
    [
        CoulombClassifier(12, random_state=0),
        CoulombClassifier(
            12, head="ridge", class_weight={"u": 2.0, "v": 1.0}, random_state=0
        ),
        CoulombRegressor(12, sampler=CoulombSampler(max_iter=3), random_state=0),
        CoulombRegressor(12, raw_columns=False, alphas=[0.1, 1.0], random_state=0),
    ],
    ids=["logistic", "ridge classes", "own sampler", "features only"],
)
def test_save_and_load_to_the_bit(model, table, tmp_path):
    frame, y = table
    classes = isinstance(model, CoulombClassifier)
    y = np.where(y > 0.5, "u", "v") if classes else y
    model = clone(model).fit(frame, y)
    model.save(tmp_path / "model.safetensors")
    again = type(model).load(tmp_path / "model.safetensors")
    method = "predict_proba" if classes else "predict"
    found, expected = getattr(again, method)(frame), getattr(model, method)(frame)
    np.testing.assert_array_equal(found, expected)
    assert again.predict(frame).dtype == model.predict(frame).dtype
    assert str(again.get_params()) == str(model.get_params())
    np.testing.assert_array_equal(
        again.feature_importances_, model.feature_importances_
    )
    refitted = again.fit(frame, y)
    np.testing.assert_array_equal(getattr(refitted, method)(frame), expected)


def test_foreign_and_damaged_files_are_refused(table, tmp_path):
    frame, y = table
    path = tmp_path / "model.safetensors"
    CoulombRegressor(8, random_state=0).fit(frame, y).save(path)
    with pytest.raises(FileFormatError, match="CoulombRegressor"):
        CoulombClassifier.load(path)
    with safe_open(path, framework="np") as file:
        facts = json.loads(file.metadata()["coulomb"])
    arrays = load_file(path)
    short = {**arrays, "coef_": arrays["coef_"][:3]}
    save_file(short, path, metadata={"coulomb": json.dumps(facts)})
    with pytest.raises(FileFormatError, match="coef_"):
        CoulombRegressor.load(path)
    facts["learned"]["sampler_"]["estimator"]["class"] = "os.system"
    save_file(arrays, path, metadata={"coulomb": json.dumps(facts)})
    with pytest.raises(FileFormatError, match="unknown class"):
        CoulombRegressor.load(path)


def test_partial_fit_of_halves_is_fit_of_all(table):
    frame, y = table
    labels = np.where(y > 0.5, "u", "v")
    whole = CoulombClassifier(16, random_state=0).fit(frame, labels)
    parts = CoulombClassifier(16, random_state=0)
    parts.partial_fit(frame[:150], labels[:150], classes=["u", "v"])
    parts.partial_fit(frame[150:], labels[150:])
    np.testing.assert_array_equal(
        parts.predict_proba(frame), whole.predict_proba(frame)
    )


def test_partial_fit_between_doublings_fits_the_head_to_all_rows(table):
    frame, y = table
    model = CoulombRegressor(16, random_state=0).partial_fit(frame[:200], y[:200])
    particles = model.sampler_.particles_
    model.partial_fit(frame[200:], y[200:])
    assert model.sampler_.particles_ is particles
    rows = merge_rows(read_table(frame, list(frame), None), y, np.ones(300))
    z, target, weight = encode(rows[0], model.columns_), *rows[1:]
    head = fit_ridge(model._design(z), target[:, None], weight, model._alphas("ridge"))
    np.testing.assert_array_equal(model.coef_, head.coef)


def test_partial_fit_waits_for_the_second_class():
    X = np.random.default_rng(0).normal(size=(60, 2))
    model = CoulombClassifier(8, random_state=0)
    model.partial_fit(X[:20], np.zeros(20), classes=[0, 1])
    assert (model.predict(X) == 0).all()
    y = (X[20:, 0] > 0).astype(int)
    assert model.partial_fit(X[20:], y).score(X[20:], y) > 0.8
    with pytest.raises(ParameterError, match="classes of the first call"):
        model.partial_fit(X[:2], [2, 1])


@pytest.mark.parametrize("head", ["logistic", "ridge", None])
def test_importances_find_the_informative_columns(head):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 6))
    score = np.sin(2 * X[:, 1]) * X[:, 4]
    if head is None:
        model = CoulombRegressor(128, random_state=0).fit(X, score)
    else:
        model = CoulombClassifier(128, head=head, random_state=0).fit(X, score > 0)
    found = model.feature_importances_
    assert found.sum() == pytest.approx(1.0)
    assert set(np.argsort(found)[-2:]) == {1, 4}
    assert found[[1, 4]].sum() > 0.6


@pytest.mark.parametrize("raw_columns", [True, False])
def test_slopes_are_those_of_differences(raw_columns):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 3))
    model = CoulombRegressor(16, raw_columns=raw_columns, random_state=0)
    model.fit(X, X[:, 0] ** 2)
    z, step = rng.normal(size=(5, 6)), 1e-5
    slopes = model._slopes(z, model.coef_[:, 0])
    for j in range(6):
        shift = step * np.eye(6)[j]
        up, down = model._design(z + shift), model._design(z - shift)
        expected = (up - down) @ model.coef_[:, 0] / (2 * step)
        np.testing.assert_allclose(slopes[:, j], expected, rtol=1e-5, atol=1e-7)


def test_plot_draws(table):
    frame, y = table
    model = CoulombRegressor(16, random_state=0).fit(frame, y)
    assert len(model.plot().axes) == 2
    titles = [axis.get_title() for axis in model.plot().axes]
    assert titles == ["particles", "importances"]
    numbers = frame[["a", "b"]]
    model = CoulombClassifier(16, random_state=0).fit(numbers, np.digitize(y, [0, 1]))
    figure = model.plot(numbers.dropna())
    assert len(figure.axes) >= 4
    figure.canvas.draw()


def test_import_leaves_matplotlib_alone():
    code = "import sys, coulomb.estimators; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_early_stopping_own_sampler_and_threads():
    X, y = load_iris(return_X_y=True)
    sampler = CoulombSampler(interaction_strength=0.1, max_iter=7)
    model = CoulombClassifier(
        8, sampler=sampler, early_stopping=True, n_jobs=1, random_state=0
    ).fit(X, y)
    assert model.sampler_.stopping == "held-out"
    assert model.sampler_.interaction_strength == 0.1
    assert model.sampler_.n_components == 8
    assert sampler.n_components == 100  # the given one is not touched
    assert not hasattr(sampler, "particles_")


def test_early_stopping_keeps_the_joint_energy():
    """Held-out rows decide there in any case."""
    X = np.random.default_rng(0).normal(size=(120, 3))
    y = np.sin(3 * X[:, 0])
    models = [
        CoulombRegressor(8, early_stopping=early, random_state=0).fit(X, y)
        for early in (False, True)
    ]
    np.testing.assert_array_equal(*(model.predict(X) for model in models))


def test_works_inside_scikit_learn():
    X, y = load_iris(return_X_y=True)
    model = make_pipeline(StandardScaler(), CoulombClassifier(8, random_state=0))
    search = GridSearchCV(model, {"coulombclassifier__raw_columns": [True, False]})
    assert search.fit(X, y).best_score_ > 0.9
    assert "CoulombClassifier" in CoulombClassifier()._repr_html_()
    with sklearn.config_context(transform_output="pandas"):
        CoulombClassifier(8, random_state=0).fit(X, y).predict(X)


def test_metadata_routing():
    X, y = load_iris(return_X_y=True)
    weight = np.random.default_rng(0).uniform(size=150)
    with sklearn.config_context(enable_metadata_routing=True):
        model = CoulombRegressor(8, random_state=0).set_fit_request(sample_weight=True)
        pipeline = make_pipeline(FunctionTransformer(), model)
        routed = pipeline.fit(X, y, sample_weight=weight).predict(X)
        cross_val_predict(model, X, y, params={"sample_weight": weight})
    direct = CoulombRegressor(8, random_state=0).fit(X, y, sample_weight=weight)
    np.testing.assert_array_equal(routed, direct.predict(X))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"n_components": 0}, "`n_components` must be at least 1"),
        ({"alphas": [-1.0]}, "`alphas` must be positive"),
        ({"alphas": []}, "`alphas` must be None or positive numbers"),
        ({"head": "lasso"}, "`head` has no member 'lasso'"),
        ({"sampler": "rbf"}, "`sampler` must be None or a CoulombSampler"),
        ({"max_categories": 0}, "`max_categories` must be at least 1"),
    ],
)
def test_wrong_settings_are_named(settings, words):
    X, y = load_iris(return_X_y=True)
    with pytest.raises((ValueError, TypeError), match=words):
        CoulombClassifier(**settings).fit(X, y)


def test_wrong_data_are_named(table):
    frame, y = table
    model = CoulombRegressor(8, random_state=0).fit(frame, y)
    with pytest.raises(ParameterError, match="Column 'a' of `X` must hold numbers"):
        model.predict(frame.assign(a="text"))
    with pytest.raises(ParameterError, match="column 'a' holds infinity"):
        model.predict(frame.assign(a=np.inf))
    times = frame.assign(a=pd.Timestamp("2020-01-01"))
    for form in (times, pa.Table.from_pandas(times)):
        with pytest.raises(ParameterError, match="Column 'a' of `X` holds times"):
            clone(model).fit(form, y)
    with pytest.raises(ParameterError, match="two classes; got one class"):
        CoulombClassifier(8).fit(frame, np.zeros(300))
    before = vars(model).copy()
    with pytest.raises(ValueError, match="weight"):
        model.fit(frame, y, sample_weight=np.zeros(300))
    assert vars(model) == before
