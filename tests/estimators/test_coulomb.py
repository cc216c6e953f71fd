"""CoulombSampler: what it learns, how it behaves, what it refuses."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_wine
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline

from coulomb import Ball, Box, CoulombSampler, Riesz
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.dynamics.loop import StopReason
from coulomb.features import SoftmaxFeatures, projections


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 4))
    y = np.where(np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2] > 0, 1, -1)
    return X, y


def quick(n_components=20, **settings):
    return CoulombSampler(n_components, random_state=0, **settings)


class TestLearning:
    @pytest.mark.slow
    def test_learned_features_align_better_than_their_control(self, problem):
        X, y = problem
        centred = y - y.mean()

        def alignment(model):
            return ((centred @ model.transform(X)) ** 2).sum()

        gains = []
        for seed in range(8):
            learned = CoulombSampler(50, random_state=seed).fit(X, y)
            controls = [alignment(learned.control(draw)) for draw in range(20)]
            gains.append(alignment(learned) / np.mean(controls))
        # Eight independent ratios, each of which would straddle one without learning.
        assert min(gains) > 1.1

    def test_finds_the_frequency_that_was_planted(self):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(600, 3))
        y = np.sign(np.sin(4 * X[:, 1]))
        model = CoulombSampler(60, coordinates=1, random_state=0).fit(X, y)
        on_column = model.particles_[:, 1] != 0
        assert on_column.mean() > 0.6  # a third of the starting law
        frequencies = np.abs(model.particles_[on_column, 1]) / model.scale_[1]
        assert abs(np.median(frequencies) - 4) < 0.4

    def test_fixed_features_do_not_see_the_labels(self, problem):
        X, y = problem
        first = quick(max_iter=0).fit(X, y)
        second = quick(max_iter=0).fit(X, -y)
        np.testing.assert_array_equal(first.random_weights_, second.random_weights_)

    def test_fixed_features_have_the_scale_bandwidth(self, problem):
        X, y = problem
        model = CoulombSampler(20_000, max_iter=0, random_state=0).fit(X, y)
        z = (X - X.mean(axis=0)) / X.std(axis=0)
        exact = np.exp(-((z[:5, None] - z[:5]) ** 2).sum(axis=-1) / 4)
        error = 4 * np.sqrt(2 / 20_000)  # a feature product has variance below 2
        np.testing.assert_allclose(model.kernel(X[:5]), exact, atol=error)

    def test_the_control_keeps_norms_and_sparsity(self, problem):
        model = quick(200).fit(*problem)
        twin = model.control(random_state=1)
        for name in (lambda w: np.linalg.norm(w, axis=0), np.count_nonzero):
            mine, theirs = name(model.random_weights_), name(twin.random_weights_)
            np.testing.assert_allclose(mine, theirs)
        assert not np.allclose(model.random_weights_, twin.random_weights_)

    def test_labels_without_signal_are_not_learned_by_heart(self):
        """On noise, held-out accuracy stays at a half whatever was chosen."""
        rng = np.random.default_rng(1)
        X, y = rng.normal(size=(400, 4)), rng.integers(0, 2, size=400)
        model = make_pipeline(quick(50), LogisticRegression())
        hits = cross_val_predict(model, X, y, cv=4) == y
        assert abs(hits.mean() - 0.5) < 4 * np.sqrt(0.25 / 400)

    def test_history_and_reason(self, problem):
        model = quick(max_iter=30, objective="alignment").fit(*problem)
        steps = ["step", "energy", "alignment", "repulsion", "displacement"]
        assert set(steps) <= set(model.history_)
        assert model.history_["step"].tolist() == [0, 10, 20, 30]
        assert model.n_iter_ == 30
        assert model.stop_reason_ == StopReason.MAX_STEPS.value
        assert 1 <= model.effective_sample_size_ <= model.n_candidates
        assert model.selection_
        assert {"law", "score"} == set(model.selection_[0])

    def test_same_seed_same_features(self, problem):
        first, second = (quick().fit(*problem).random_weights_ for _ in range(2))
        np.testing.assert_array_equal(first, second)
        other = CoulombSampler(20, random_state=1).fit(*problem).random_weights_
        assert not np.array_equal(first, other)

    def test_same_features_on_one_and_two_threads(self):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(4000, 5))
        y = X[:, 0] * X[:, 1] > 0
        weights = []
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                model = quick(300, gamma="scale", coordinates="all").fit(X, y)
                weights.append(model.random_weights_)
        finally:
            torch.set_num_threads(1)
        np.testing.assert_array_equal(*weights)

    def test_without_compiled_loops(self, problem, monkeypatch):
        compiled = quick().fit(*problem)
        monkeypatch.setenv("COULOMB_NUMBA", "0")
        plain = quick().fit(*problem)
        np.testing.assert_allclose(
            compiled.random_weights_, plain.random_weights_, atol=1e-6
        )


class TestSettings:
    @pytest.mark.parametrize(
        "settings",
        [
            {"gamma": 0.7},
            {"gamma": "scale"},
            {"coordinates": 2},
            {"coordinates": "all"},
            {"gamma": 0.7, "coordinates": 1, "inverse_temperature": 50.0},
            {"inverse_temperature": np.inf, "max_iter": 5},
            {"n_candidates": None, "inverse_temperature": 30.0},
            {"interaction": Riesz(s=1, truncation=0.1)},
            {"interaction": "riesz", "interaction_strength": 0.0},
            {"domain": Ball(2.0)},
            {"domain": Box(-2, 2)},
            {"prior": False},
            {"batch_size": 32},
            {"batch_size": None},
            {"labels": "balanced"},
            {"labels": "paper"},
            {"resample": "gibbs", "n_particles": 40},
            {"n_particles": 40},
            {"objective": "alignment", "stopping": "held-out", "max_iter": 400},
            {"standardize": False},
            {"step_size": 0.5},
            {"feature_map": "softmaxfeat"},
            {"feature_map": SoftmaxFeatures(0.5), "n_particles": 30},
            {"feature_map": "cos2"},
            {"feature_map": lambda x, particles: projections(x, particles).tanh()},
        ],
        ids=lambda settings: "-".join(settings),
    )
    def test_every_setting_gives_finite_features(self, problem, settings):
        X, y = problem
        model = quick(**({"max_iter": 20} | settings)).fit(X, y)
        features = model.transform(X[:10])
        assert features.shape == (10, 20)
        assert np.isfinite(features).all()
        assert np.isfinite(model.history_["alignment"]).all()

    def test_particles_stay_in_their_domain(self, problem):
        model = quick(domain=Ball(0.8), coordinates="all").fit(*problem)
        assert np.linalg.norm(model.particles_, axis=1).max() <= 0.8 + 1e-9

    def test_sparse_particles_keep_their_number_of_columns(self, problem):
        model = quick(coordinates=2).fit(*problem)
        assert (np.count_nonzero(model.particles_, axis=1) == 2).all()

    def test_the_kernel_is_the_product_of_features(self, problem):
        X, y = problem
        for feature_map in ("fourier", "softplus"):
            model = quick(feature_map=feature_map, max_iter=5).fit(X, y)
            features = model.transform(X[:6])
            np.testing.assert_allclose(
                model.kernel(X[:6], X[:3]), features @ features[:3].T
            )

    def test_tolerance(self, problem):
        with pytest.warns(ConvergenceWarning, match="before `tol` = 1e-09 was reached"):
            quick(tol=1e-9, max_iter=20).fit(*problem)
        model = quick(tol=10.0, max_iter=2000).fit(*problem)
        assert model.stop_reason_ == StopReason.SETTLED.value
        assert model.n_iter_ < 2000
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = quick(tol=0, max_iter=40, objective="alignment").fit(*problem)
            assert model.n_iter_ == 40

    def test_the_papers_constants(self, problem):
        model = CoulombSampler.paper(20, max_iter=50, random_state=0).fit(*problem)
        assert len(model.particles_) == 300
        assert model.get_params()["step_size"] == 30
        assert np.linalg.norm(model.particles_, axis=1).max() <= 5 + 1e-6
        # Most particles sit on the sphere: why these are not the defaults.
        on_wall = np.linalg.norm(model.particles_, axis=1) > 5 - 1e-6
        assert on_wall.mean() > 0.5

    def test_verbose_shows_progress(self, problem, capsys):
        quick(verbose=1).fit(*problem)
        assert "moving particles" in capsys.readouterr().err


class TestTargets:
    def test_regression_is_recognised(self):
        X, y = load_diabetes(return_X_y=True)  # whole numbers, 214 different ones
        model = quick(64).fit(X, y)
        explicit = quick(64, target="number").fit(X, y)
        np.testing.assert_array_equal(model.random_weights_, explicit.random_weights_)

    def test_classes_can_be_anything(self, problem):
        X, y = problem
        expected = quick().fit(X, y).random_weights_
        for labels in (y > 0, np.where(y > 0, "yes", "no"), (y + 1) // 2, y * 1.0):
            np.testing.assert_array_equal(
                quick().fit(X, labels).random_weights_, expected
            )

    def test_many_classes(self):
        X, y = load_wine(return_X_y=True)
        assert quick().fit(X, y).transform(X).shape == (178, 20)

    def test_target_scale_does_not_matter(self, problem):
        X, _ = problem
        y = np.sin(X[:, 0])
        first = quick().fit(X, y).random_weights_
        second = quick().fit(X, 1e6 * y - 3).random_weights_
        np.testing.assert_allclose(first, second, atol=1e-6)

    def test_columns_may_have_any_unit(self, problem):
        X, y = problem
        scaled = X * np.array([1e-6, 1.0, 1e6, 3.0]) + np.array([0, 50, 0, -7])
        np.testing.assert_allclose(
            quick().fit(X, y).transform(X),
            quick().fit(scaled, y).transform(scaled),
            atol=1e-5,
        )

    def test_constant_columns_change_nothing(self, problem):
        X, y = problem
        with_constant = np.column_stack([X, np.full(len(X), 3.0)])
        np.testing.assert_allclose(
            quick().fit(X, y).transform(X),
            quick().fit(with_constant, y).transform(with_constant),
        )
        thin = sparse.csr_matrix(with_constant)
        np.testing.assert_array_equal(
            quick().fit(thin, y)._varying, [True] * 4 + [False]
        )
        only = np.ones((10, 2))
        features = quick().fit(only, np.arange(10) % 2).transform(only)
        assert np.isfinite(features).all()


class TestData:
    def test_weights_are_repetitions(self, problem):
        X, y = problem[0][:30], problem[1][:30]
        counts = np.random.default_rng(0).integers(0, 4, size=30)
        weighted = quick().fit(X, y, sample_weight=counts)
        repeated = quick().fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
        np.testing.assert_allclose(
            weighted.transform(X), repeated.transform(X), atol=1e-9
        )
        scaled = quick().fit(X, y, sample_weight=10.0 * counts)
        np.testing.assert_allclose(weighted.transform(X), scaled.transform(X))

    def test_sparse_and_dense_agree(self, problem):
        X, y = problem
        X = X * (np.random.default_rng(0).random(X.shape) < 0.4)
        dense = quick().fit(X, y)
        thin = quick().fit(sparse.csr_matrix(X), y)
        np.testing.assert_allclose(dense.random_weights_, thin.random_weights_)
        np.testing.assert_allclose(
            dense.transform(X), thin.transform(sparse.csr_array(X)), atol=1e-12
        )

    def test_float32_in_float32_out(self, problem):
        X, y = problem
        model = quick().fit(X.astype(np.float32), y)
        assert model.transform(X.astype(np.float32)).dtype == np.float32
        np.testing.assert_allclose(
            model.transform(X.astype(np.float32)), model.transform(X), atol=1e-5
        )

    def test_pandas_in_and_out(self, problem):
        X, y = problem
        frame = pd.DataFrame(X, columns=list("abcd"))
        model = quick(3).set_output(transform="pandas").fit(frame, pd.Series(y))
        out = model.transform(frame)
        names = ["coulombsampler0", "coulombsampler1", "coulombsampler2"]
        assert list(out.columns) == names == list(model.get_feature_names_out())
        assert out.index.equals(frame.index)

    def test_many_rows_use_batches_and_single_precision(self):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(30_000, 3)).astype(np.float32)
        y = np.sin(3 * X[:, 0]) > 0
        model = quick(40, gamma="scale", coordinates=1).fit(X, y)
        assert (model.particles_[:, 0] != 0).mean() > 0.6

    def test_long_runs_move_in_single_precision_and_keep_few_records(self, problem):
        X, y = problem
        settings = {"gamma": "scale", "coordinates": "all", "objective": "alignment"}
        long = quick(max_iter=400, **settings).fit(X, y)
        single = long.particles_.astype(np.float32)
        np.testing.assert_array_equal(long.particles_, single)
        assert long.history_["step"].tolist() == [0, *range(10, 401, 10)]
        longer = quick(max_iter=1000, **settings).fit(X, y)
        assert len(longer.history_["step"]) == 51
        watched = quick(max_iter=1000, tol=1e-9, **settings)
        with pytest.warns(ConvergenceWarning):
            assert len(watched.fit(X, y).history_["step"]) == 101

    def test_large_angles_stay_in_double_precision(self, problem):
        X, y = problem
        model = quick(max_iter=200, standardize=False, gamma=0.5, pursuit=0)
        model.fit(1e4 * X, y)
        single = model.particles_.astype(np.float32)
        assert (model.particles_ != single).any()

    def test_a_batch_larger_than_the_data_is_the_data(self, problem):
        whole, batch = (
            quick(batch_size=size, max_iter=20).fit(*problem).particles_
            for size in (None, 10**9)
        )
        np.testing.assert_array_equal(whole, batch)


class TestChunks:
    def test_chunks_learn_too(self, problem):
        X, y = problem
        model = quick(50, max_iter=20)
        for start in range(0, 300, 60):
            part = slice(start, start + 60)
            model.partial_fit(X[part], y[part], classes=[-1, 1])
        assert model.n_iter_ == 100
        centred = y - y.mean()
        learned = ((centred @ model.transform(X)) ** 2).sum()
        control = ((centred @ model.control(0).transform(X)) ** 2).sum()
        assert learned > control

    def test_a_chunk_with_one_class_waits(self, problem):
        X, y = problem
        model = quick(max_iter=5)
        model.partial_fit(X[y == 1][:20], y[y == 1][:20], classes=[-1, 1])
        assert model.n_iter_ == 0
        assert model.partial_fit(X[:50], y[:50]).n_iter_ == 5

    def test_memory_is_bounded(self, monkeypatch, problem):
        from coulomb.estimators import base

        monkeypatch.setattr(base, "_MOST_ROWS", 100)
        X, y = problem
        model = quick(max_iter=1)
        for _ in range(3):
            model.partial_fit(X, y)
        assert len(model._reservoir.arrays[0]) == 100
        assert model._reservoir.seen == 900

    def test_new_classes_are_refused(self, problem):
        X, y = problem
        model = quick(max_iter=2).partial_fit(X, y)
        before = model.random_weights_.copy()
        with pytest.raises(ParameterError, match=r"`y` must hold only.*partial_fit\("):
            model.partial_fit(X, np.full(len(X), 7))
        np.testing.assert_array_equal(model.random_weights_, before)

    def test_chunks_survive_a_pickle(self, problem):
        X, y = problem
        model = quick(max_iter=5).partial_fit(X[:100], y[:100])
        twin = pickle.loads(pickle.dumps(model))
        for one in (model, twin):
            one.partial_fit(X[100:], y[100:])
        np.testing.assert_array_equal(model.random_weights_, twin.random_weights_)


class TestCompany:
    def test_pipeline_grid_search_and_clone(self, problem):
        X, y = problem
        model = make_pipeline(quick(max_iter=5), LogisticRegression())
        grid = {"coulombsampler__n_components": [5, 30]}
        search = GridSearchCV(model, grid, cv=3).fit(X, y)
        assert search.best_params_["coulombsampler__n_components"] == 30
        assert search.best_score_ > 0.6
        again = clone(search.best_estimator_).fit(X, y)
        np.testing.assert_array_equal(again.predict(X), search.predict(X))

    def test_regression_pipeline(self):
        X, y = load_diabetes(return_X_y=True)
        model = make_pipeline(quick(100), Ridge(1.0)).fit(X[::2], y[::2])
        assert model.score(X[1::2], y[1::2]) > 0.3


class TestFiles:
    @pytest.mark.parametrize(
        "settings",
        [{}, {"domain": Ball(3.0), "interaction": Riesz(1.0), "clip": np.inf}],
    )
    def test_round_trip(self, problem, tmp_path, settings):
        X, y = problem
        frame = pd.DataFrame(X, columns=list("abcd"))
        model = quick(max_iter=10, **settings).fit(frame, y)
        model.save(tmp_path / "model.safetensors")
        loaded = CoulombSampler.load(tmp_path / "model.safetensors")
        np.testing.assert_array_equal(loaded.transform(frame), model.transform(frame))
        assert loaded.get_params() == model.get_params()
        assert loaded.stop_reason_ == model.stop_reason_
        assert list(loaded.feature_names_in_) == list("abcd")
        for name, values in model.history_.items():
            np.testing.assert_array_equal(loaded.history_[name], values)

    def test_pickle(self, problem):
        X, y = problem
        model = quick(max_iter=10).fit(X, y)
        twin = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(twin.transform(X), model.transform(X))

    def test_damaged_and_foreign_files(self, problem, tmp_path):
        from coulomb import OrthogonalSampler

        path = tmp_path / "model.safetensors"
        quick(max_iter=5).fit(*problem).save(path)
        whole = path.read_bytes()
        with pytest.raises(FileFormatError, match="holds a 'CoulombSampler'"):
            OrthogonalSampler.load(path)
        for content in (b"", b"junk", whole[:-100]):
            path.write_bytes(content)
            with pytest.raises(FileFormatError, match="is not a saved estimator"):
                CoulombSampler.load(path)
        path.write_bytes(whole.replace(b'\\"n_components\\"', b'\\"n_componentz\\"'))
        with pytest.raises(FileFormatError, match="is damaged"):
            CoulombSampler.load(path)

    def test_own_functions_cannot_be_saved(self, problem, tmp_path):
        own = quick(feature_map=lambda x, particles: projections(x, particles).tanh())
        own.fit(*problem)
        with pytest.raises(ParameterError, match="`feature_map` must be a name"):
            own.save(tmp_path / "model.safetensors")
        assert list(tmp_path.iterdir()) == []

    def test_unfitted(self, tmp_path):
        with pytest.raises(NotFittedError):
            quick().save(tmp_path / "model.safetensors")


BAD_SETTINGS = [
    ({"n_components": 0}, "`n_components` must be at least 1; got 0"),
    ({"n_components": 2.5}, "`n_components` must be a whole number; got 2.5"),
    ({"n_particles": 10}, "`n_components` must be at most `n_particles` = 10; got 20"),
    ({"max_iter": -1}, "`max_iter` must be at least 0; got -1"),
    ({"tol": -1.0}, "`tol` must be at least 0; got -1"),
    ({"step_size": -0.1}, "`step_size` must be positive; got -0.1"),
    ({"step_size": "big"}, "`step_size` has no member 'big'"),
    ({"gamma": 0}, "`gamma` must be positive; got 0"),
    ({"gamma": "scales"}, "did you mean 'scale'"),
    ({"coordinates": 0}, "`coordinates` must be at least 1; got 0"),
    ({"coordinates": "al"}, "did you mean 'all'"),
    ({"inverse_temperature": -1}, "`inverse_temperature` must be positive; got -1"),
    ({"n_candidates": None}, "`inverse_temperature` must be a number when"),
    ({"interaction": "lgo"}, "did you mean 'log'"),
    ({"interaction": 3}, "`interaction` must be a name or a interaction; got 3"),
    ({"interaction_strength": -1}, "`interaction_strength` must be at least 0"),
    ({"domain": "bal"}, "did you mean 'ball'"),
    ({"clip": 0}, "`clip` must be positive; got 0"),
    ({"clip": np.nan}, "`clip` must be finite; got nan"),
    ({"feature_map": "forier"}, "did you mean 'fourier'"),
    ({"batch_size": 1}, "`batch_size` must be at least 2; got 1"),
    ({"labels": "centered"}, "did you mean 'centred'"),
    ({"target": "class"}, "did you mean 'classes'"),
    ({"resample": "gibs"}, "did you mean 'gibbs'"),
    ({"stopping": "heldout"}, "did you mean 'held-out'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=str)
def test_bad_settings(problem, settings, message):
    model = quick().set_params(**settings)
    with pytest.raises((ValueError, TypeError)) as caught:
        model.fit(*problem)
    assert message in str(caught.value)
    with pytest.raises(NotFittedError):
        model.transform(problem[0])


def bad_rows():
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = np.arange(40) % 2
    spoiled = {}
    for name, value in (("nan", np.nan), ("inf", np.inf)):
        wrong = X.copy()
        wrong[3, 1] = value
        spoiled[f"{name} in X"] = (wrong, y, "contains")
        target = np.linspace(0, 1, 40)
        target[5] = value
        spoiled[f"{name} in y"] = (X, target, "contains")
    return spoiled | {
        "one class": (X, np.ones(40), "`y` must vary.*got one class"),
        "one value": (X, np.full(40, 0.5), "`y` must vary.*got one value"),
        "one sample": (X[:1], y[:1], "minimum of 2"),
        "no sample": (X[:0], y[:0], "0 sample"),
        "no column": (X[:, :0], y, r"0 feature\(s\)"),
        "wrong length": (X, y[:-1], "inconsistent numbers of samples"),
        "object column": (_words(X), y, "convert"),
        "too large": (X * 1e305, y, "too large to standardise"),
        "one dimension": (X[:, 0], y, "2D array"),
    }


def _words(X):
    words = X.astype(object)
    words[0, 0] = "high"
    return words


@pytest.mark.parametrize("case", bad_rows().values(), ids=bad_rows().keys())
def test_bad_rows(case):
    X, y, message = case
    model = quick()
    with pytest.raises(ValueError, match=message):
        model.fit(X, y)
    with pytest.raises(NotFittedError):
        model.transform(np.zeros((1, 3)))


def test_a_failed_fit_leaves_the_former_one(problem):
    X, y = problem
    model = quick(max_iter=5).fit(X, y)
    before = model.transform(X)
    with pytest.raises(ParameterError):
        model.fit(X, np.ones(len(X)))
    np.testing.assert_array_equal(model.transform(X), before)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_columns_are_standardised_without_overflow(problem, dtype):
    X, y = problem
    huge = (X * 1e30).astype(dtype)
    np.testing.assert_allclose(
        quick().fit(huge, y).transform(huge),
        quick().fit(X.astype(dtype), y).transform(X.astype(dtype)),
        atol=1e-3 if dtype == np.float32 else 1e-6,
    )


def test_weights_must_make_sense(problem):
    X, y = problem
    with pytest.raises(ValueError, match="at least one non-zero"):
        quick().fit(X, y, sample_weight=np.zeros(len(X)))
    with pytest.raises(ValueError, match="Negative"):
        quick().fit(X, y, sample_weight=-np.ones(len(X)))
