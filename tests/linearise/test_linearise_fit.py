"""Energies of particles against the double sums, the start, and the fit of a layer."""

import math

import pytest
import torch
from linearise_cases import particles_case, rows_case

from coulomb._support.errors import ParameterError
from coulomb.features import Favor, Particles, SoftmaxFeatures
from coulomb.linearise import LineariseSettings
from coulomb.linearise.fit import (
    OutputError,
    RowAlignment,
    RowDivergence,
    centred,
    fit_layer,
    for_both,
    imitations,
    landmark_start,
)
from coulomb.linearise.heads import HeadParticles, softmax_rows
from coulomb.linearise.teacher import Rows
from coulomb.objectives import AbstractObjective


def make_rows(**options):
    q, k, v, mask = rows_case(**options)
    return Rows(q, k, v, mask, mask)


def heads(positions, tilt):
    return HeadParticles(positions, tilt, SoftmaxFeatures())


def by_hand(rows, positions, tilt, compare):
    """The mean over real queries of a comparison of two rows, one at a time."""
    teacher = softmax_rows(rows.q, rows.k, rows.key_mask)
    particles = HeadParticles(positions, tilt, SoftmaxFeatures())
    student = particles.rows(rows.q, rows.k, rows.key_mask)
    heads = []
    for head in range(rows.q.shape[1]):
        values = [
            compare(teacher[b, head, i], student[b, head, i], rows.v[b, head])
            for b, i in rows.query_mask.nonzero().tolist()
        ]
        heads.append(sum(values) / len(values))
    return torch.stack(heads)


def divergence(p, s, _):
    seen = p > 0
    return (p[seen] * (p[seen] / s[seen]).log()).sum()


def test_divergence_is_the_double_sum():
    rows, (positions, tilt) = make_rows(), particles_case()
    energy = RowDivergence.measure([rows], heads(positions, tilt))
    torch.testing.assert_close(energy, by_hand(rows, positions, tilt, divergence))
    assert (energy > 0).all()


def test_row_alignment_is_the_mean_cosine():
    rows, (positions, tilt) = make_rows(), particles_case()
    energy = RowAlignment.measure([rows], heads(positions, tilt))
    cosine = by_hand(
        rows, positions, tilt, lambda p, s, _: p @ s / (p.norm() * s.norm())
    )
    torch.testing.assert_close(energy, 1 - cosine)


def test_output_error_is_relative():
    rows, (positions, tilt) = make_rows(), particles_case()
    energy = OutputError.measure([rows], heads(positions, tilt))
    wrong = by_hand(rows, positions, tilt, lambda p, s, v: ((p - s) @ v).square().sum())
    size = by_hand(rows, positions, tilt, lambda p, s, v: (p @ v).square().sum())
    torch.testing.assert_close(energy, wrong / size)
    scaled = rows._replace(v=7 * rows.v)
    again = OutputError.measure([scaled], heads(positions, tilt))
    torch.testing.assert_close(again, energy)


@pytest.mark.parametrize("name", list(imitations))
class TestEveryImitation:
    def build(self, name, rows, tilt):
        return imitations.build(name, batches=rows, start=heads(None, tilt))

    def test_one_number_per_head_whatever_the_order(self, name):
        rows, (positions, tilt) = make_rows(), particles_case()
        energy = self.build(name, [rows], tilt)
        value = energy.energy(Particles(positions))
        assert value.shape == (3,)
        assert (value >= 0).all()
        order = torch.tensor([3, 1, 4, 0, 2])
        shuffled = energy.energy(Particles(positions[:, order]))
        torch.testing.assert_close(shuffled, value)

    def test_gradient_is_the_difference_quotient(self, name):
        rows, (positions, tilt) = make_rows(), particles_case()
        energy = self.build(name, [rows], tilt)
        leaf = positions.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: energy.energy(Particles(x)), (leaf,))

    def test_padding_does_not_count(self, name):
        rows, (positions, tilt) = make_rows(), particles_case()
        value = self.build(name, [rows], tilt).energy(Particles(positions))
        junk = rows.q.clone(), rows.k.clone()
        for x in junk:
            x[1:, :, 5:] = 9.0
        again = self.build(name, [rows._replace(q=junk[0], k=junk[1])], tilt)
        torch.testing.assert_close(again.energy(Particles(positions)), value)

    def test_shared_particles_are_pairs_of_equal_rows(self, name):
        rows, (positions, tilt) = make_rows(), particles_case()
        half = positions[..., :5]
        energy = self.build(name, [rows], tilt)
        pair = Particles(torch.cat([half, half], dim=-1))
        torch.testing.assert_close(energy.energy(Particles(half)), energy.energy(pair))


def both_fields(rows, positions, tilt, feature_map=None, window=0):
    start = HeadParticles(positions, tilt, feature_map or SoftmaxFeatures(), window)
    energy, particles = RowDivergence(rows, start), Particles(positions)
    return energy.field(particles), AbstractObjective.field(energy, particles)


class TestDivergenceField:
    """The divergence written out against autograd of the definition."""

    @pytest.mark.parametrize("temperature", [0.5, 1.0])
    @pytest.mark.parametrize("shared", [False, True])
    def test_value_and_gradient_are_those_of_the_definition(self, temperature, shared):
        positions, tilt = particles_case()
        if shared:
            positions = positions[..., :5]
        rows = [make_rows(), make_rows(seed=3, n=9)]
        feature_map = SoftmaxFeatures(temperature=temperature)
        for ours, twin in zip(
            *both_fields(rows, positions, tilt, feature_map), strict=True
        ):
            torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-11)

    def test_fewer_queries_than_keys_in_any_memory_order(self):
        positions, tilt = particles_case()
        rows = make_rows()
        few = rows._replace(q=rows.q[:, :, 1:4], query_mask=rows.query_mask[:, 1:4])
        turned = few._replace(k=few.k.transpose(0, 1).contiguous().transpose(0, 1))
        fields = [*both_fields([few], positions, tilt)]
        fields += both_fields([turned], positions, tilt)
        for other in fields[1:]:
            for ours, twin in zip(fields[0], other, strict=True):
                torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-11)

    def test_bias_of_the_scores(self):
        positions, tilt = particles_case()
        source = torch.Generator().manual_seed(5)
        bias = torch.randn(1, 3, 7, 7, generator=source, dtype=torch.float64)
        rows = make_rows()._replace(bias=bias)
        for ours, twin in zip(*both_fields([rows], positions, tilt), strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-11)

    def test_a_sequence_of_padding_does_not_count(self):
        positions, tilt = particles_case()
        rows = make_rows()
        mask = rows.key_mask.clone()
        mask[1] = False
        alone = Rows(*(x[:1] for x in rows[:5]))
        rows = rows._replace(key_mask=mask, query_mask=mask)
        ours, _ = both_fields([rows], positions, tilt)
        twin, _ = both_fields([alone], positions, tilt)
        for one, other in zip(ours, twin, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)

    def test_far_particles_stay_finite_in_single_precision(self):
        rows = make_rows(dtype=torch.float32)
        positions, tilt = particles_case(dtype=torch.float32)
        ours, _ = both_fields([rows], 60 * positions, tilt)
        assert ours.potential.isfinite().all()
        assert ours.gradient.isfinite().all()

    @pytest.mark.parametrize("window", [1, 3, 20])
    def test_a_band_is_exact(self, window, generator):
        rows, (positions, tilt) = make_rows(), particles_case()
        for part in (rows, rows.some_queries(3, generator=generator)):
            fields = both_fields([part], positions, tilt, window=window)
            for ours, twin in zip(*fields, strict=True):
                torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-12)
        if window == 20:  # all keys are near
            torch.testing.assert_close(fields[0].gradient, 0 * positions)

    def test_other_maps_go_through_autograd(self):
        positions, tilt = particles_case()
        ours, twin = both_fields([make_rows()], positions, tilt, Favor())
        assert torch.equal(ours.gradient, twin.gradient)


def test_raw_alignment_looks_at_the_largest_entries_only():
    """A row whose query is long has all the norm: other rows may be anything."""
    q, k, v, _ = rows_case(batch=1, heads=1)
    mask = torch.ones(1, 7, dtype=torch.bool)
    q = q.clone()
    q[:, :, 0] *= 40
    positions, tilt = particles_case(heads=1)
    bias = 2 * torch.rand(1, 1, 7, 7, generator=torch.Generator().manual_seed(2))
    bias[:, :, 0] = 0  # the teacher changes its mind in all rows but the first
    phi_q, phi_k = heads(positions, tilt).features(q, k)
    student = phi_q @ phi_k.transpose(-1, -2)
    raw, rowwise = [], []
    for other in (torch.zeros(()), bias.double()):
        teacher = (q @ k.transpose(-1, -2) / 2 + other).exp()
        raw.append(torch.cosine_similarity(teacher.flatten(), student.flatten(), dim=0))
        rows = Rows(q, k, v, mask, mask, other.expand(1, 1, 7, 7))
        rowwise.append(RowDivergence.measure([rows], heads(positions, tilt)))
    assert abs(raw[0] - raw[1]) < 1e-3
    assert abs(rowwise[0] - rowwise[1]) > 0.02


class TestStart:
    def clustered(self, n_clusters=6, n=120, dim=4):
        source = torch.Generator().manual_seed(0)
        centres = 2 * torch.randn(2, n_clusters, dim, generator=source)
        chosen = torch.randint(n_clusters, (n,), generator=source)
        k = centres[:, chosen] + 0.05 * torch.randn(2, n, dim, generator=source)
        q = 2 * torch.randn(2, n, dim, generator=source) + 1
        return q, k

    def divergence(self, start, q, k):
        mask = torch.ones(1, q.shape[1], dtype=torch.bool)
        rows = Rows(q.unsqueeze(0), k.unsqueeze(0), k.unsqueeze(0), mask, mask)
        return RowDivergence.measure([rows], start)

    def landmarks(self, q, k, count, generator):
        positions = landmark_start(q, k, count, generator=generator)
        return centred(positions, q, SoftmaxFeatures())

    def test_landmarks_beat_random_particles(self, generator):
        q, k = self.clustered()
        near = self.landmarks(q, k, 12, generator)
        rows = 0.5 * torch.randn(2, 12, 4, generator=generator)
        far = centred(for_both(rows), q, SoftmaxFeatures())
        ratio = self.divergence(near, q, k) / self.divergence(far, q, k)
        assert (ratio < 0.6).all()

    def test_tilt_centres_the_queries(self, generator):
        q, k = self.clustered()
        start = self.landmarks(q, k, 12, generator)
        total = start.key_tilt
        torch.testing.assert_close(total, q.mean(dim=1) / math.sqrt(4))

    def test_fewer_tokens_than_landmarks(self, generator):
        q, k = self.clustered(n=5)
        start = self.landmarks(q, k, 12, generator)
        assert start.positions.isfinite().all()

    def test_constant_keys(self, generator):
        q, _ = self.clustered()
        start = self.landmarks(q, torch.ones_like(q), 3, generator)
        assert start.positions.isfinite().all()


class TestFit:
    def case(self, **changes):
        parts = [
            make_rows(batch=2, heads=2, n=12, seed=s, dtype=torch.float32)
            for s in range(6)
        ]
        parts = [rows._replace(q=2 * rows.q, k=2 * rows.k) for rows in parts]
        settings = LineariseSettings(
            window=1, **{"n_features": 6, "steps": 40, "check_every": 10, **changes}
        )
        return parts[:4], parts[4:], settings

    def fit(self, seed=0, **changes):
        fit, held, settings = self.case(**changes)
        source = torch.Generator().manual_seed(seed)
        return fit_layer(fit, held, settings, generator=source)

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"shared": True},
            {"repulsion": 0.01},
            {"inverse_temperature": 1e4},
            {"objective": "mse"},
            {"objective": "alignment"},
            {"feature_map": "favor"},
            {"start": "random"},
        ],
        ids=str,
    )
    def test_learning_helps_on_held_out_rows(self, changes):
        fit = self.fit(**changes)
        assert fit.after.mean() < fit.before.mean()
        assert fit.positions.shape == (2, 6, 10)

    def test_no_head_gets_worse(self):
        fit = self.fit(step_size=3.0)  # far too long
        assert (fit.after <= fit.before).all()

    def test_same_seed_same_particles(self):
        one, two, other = self.fit(), self.fit(), self.fit(seed=1)
        assert torch.equal(one.positions, two.positions)
        assert not torch.equal(one.positions, other.positions)

    def test_stops_when_nothing_is_gained(self):
        fit = self.fit(step_size=30.0, steps=1000, patience=2)
        assert fit.steps == 20

    def test_random_features_are_worse(self):
        fit = self.fit()
        assert fit.after.mean() < fit.random.mean()
        assert (fit.random > 0).all()

    def test_some_queries_keep_their_rows(self, generator):
        rows = make_rows()
        few = rows.some_queries(3, generator=generator)
        assert few.q.shape[2] == few.query_mask.shape[1] == 3
        full, part = rows.softmax(), few.softmax()
        same = torch.isclose(full[0, 0, None], part[0, 0, :, None]).all(dim=-1)
        where = same.int().argmax(dim=1)
        torch.testing.assert_close(full[:, :, where], part)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_features": 0}, "`n_features` must be at least 1"),
        ({"feature_map": "fourier"}, "must be positive and need no phases"),
        ({"feature_map": "softmax"}, "did you mean 'softmaxfeat'"),
        ({"objective": "lk"}, "Known: alignment, kl"),
        ({"pooling": "max"}, "`pooling` has no member 'max'.*Known: first, mean"),
        ({"start": "landmarks", "feature_map": "elu"}, "'random' or 'auto'"),
        ({"step_size": 0.0}, "`step_size` must be positive"),
        ({"long_share": 1.5}, "`long_share` must be at most 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ParameterError, match=message):
        LineariseSettings(**settings)
