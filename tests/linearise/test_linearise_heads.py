"""Query and key particles: the linear form against its quadratic twin, masks, tilt."""

import math

import pytest
import torch
from linearise_cases import particles_case, rows_case

from coulomb._support.errors import ParameterError
from coulomb.features import Favor, SoftmaxFeatures
from coulomb.linearise import LinearisedAttention, LinearisedHeads
from coulomb.linearise import heads as module
from coulomb.linearise.fit import untilted
from coulomb.linearise.heads import HeadParticles, as_positive_map, softmax_rows

MAPS = ["softmaxfeat", "favor", "elu", "softplus", "sigmoid2"]


@pytest.mark.parametrize("name", MAPS)
def test_linear_form_is_the_quadratic_one_in_value_and_gradient(name):
    feature_map = as_positive_map(name)
    q, k, v, mask = rows_case()
    positions, tilt = particles_case()
    results = []
    for form in ("linear", "quadratic"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, positions)]
        particles = HeadParticles(leaves[3], tilt, feature_map)
        if form == "linear":
            out = particles.attend(*leaves[:3], mask)
        else:
            out = particles.rows(*leaves[:2], mask) @ leaves[2]
        (out.sin() * mask[:, None, :, None]).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_the_maps(temperature):
    feature_map = SoftmaxFeatures(temperature=temperature)
    q, k, v, mask = rows_case()
    particles = HeadParticles(*particles_case(), feature_map)
    out = particles.attend(q, k, v, mask)
    torch.testing.assert_close(out, particles.rows(q, k, mask) @ v)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("tokens_first", [True, False])
def test_memory_order_and_other_sequences_change_nothing(masked, tokens_first):
    q, k, v, mask = rows_case(batch=3, n=70)
    if tokens_first:  # as the projections of transformers are split
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    positions, tilt = particles_case()
    mask = mask if masked else None
    particles = HeadParticles(positions.requires_grad_(), tilt, SoftmaxFeatures())
    whole = particles.attend(q, k, v, mask).detach()
    torch.testing.assert_close(whole, (particles.rows(q, k, mask) @ v).detach())
    with torch.no_grad():
        for part in (slice(0, 3), slice(1, 2)):
            given = mask[part] if masked else None
            out = particles.attend(q[part], k[part], v[part], given)
            torch.testing.assert_close(out, whole[part])
            # Heads are joined without a copy.
            assert out.transpose(1, 2).is_contiguous()


def test_other_counts_of_queries_and_keys():
    q, k, v, mask = rows_case(n=9)
    particles = HeadParticles(*particles_case(), SoftmaxFeatures())
    out = particles.attend(q[:, :, :4], k, v, mask)
    torch.testing.assert_close(out, particles.attend(q, k, v, mask)[:, :, :4])


@pytest.mark.parametrize("name", MAPS)
def test_padding_is_not_seen_whatever_stands_there(name):
    q, k, v, mask = rows_case()
    particles = HeadParticles(*particles_case(), as_positive_map(name))
    out = particles.attend(q, k, v, mask)
    short = particles.attend(q[1:, :, :5], k[1:, :, :5], v[1:, :, :5])
    torch.testing.assert_close(out[1:, :, :5], short)
    for x in (k, v):
        x[1:, :, 5:] = math.nan
    torch.testing.assert_close(particles.attend(q, k, v, mask), out)


def test_a_sequence_of_padding_gives_zero():
    q, k, v, mask = rows_case()
    mask[1] = False
    particles = HeadParticles(*particles_case(), SoftmaxFeatures())
    out = particles.attend(q, k, v, mask)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].isfinite().all()


def test_tilt_centres_the_queries_exactly():
    """exp(q.k) = exp(c.k) exp((q - c).k): softmax of shifted queries, tilted keys."""
    q, k, _, mask = rows_case()
    centre = q.mean(dim=(0, 2), keepdim=True)
    tilt = centre[0, :, 0] / math.sqrt(q.shape[-1])
    kernel = ((q - centre) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).exp()
    weight, _ = module.key_weight(k, tilt, mask)
    kernel = kernel * weight.transpose(-1, -2)
    rows = kernel / kernel.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(rows, softmax_rows(q, k, mask))


def test_favor_is_unbiased_for_softmax():
    """The mean over 200,000 particles is within five standard errors of exp(q.k)."""
    q, k, _, _ = rows_case(batch=1, heads=1, n=3)
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 200_000, 4, generator=source, dtype=q.dtype)
    phi_q, phi_k = untilted(rows, Favor()).features(q, k)
    # The constant coordinate adds |1|^2 / 2 to each exponent.
    products = math.e * phi_q[0, 0, :, None] * phi_k[0, 0, None] * rows.shape[1]
    error = products.std(dim=-1) / math.sqrt(rows.shape[1])
    exact = (q @ k.transpose(-1, -2) * 0.5)[0, 0].exp()
    assert ((products.mean(dim=-1) - exact).abs() < 5 * error).all()


def test_half_precision_is_computed_in_full():
    q, k, v, mask = rows_case(dtype=torch.float32)
    case = particles_case(dtype=torch.float32)
    particles = HeadParticles(*case, SoftmaxFeatures())
    q, k = q.bfloat16(), k.bfloat16()
    half = particles.attend(q, k, v.bfloat16(), mask)
    full = particles.attend(q.float(), k.float(), v, mask)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, rtol=0.02, atol=0.02)


class TestHeads:
    def heads(self, exact):
        heads = LinearisedHeads(3, 4, n_features=5, exact_heads=exact).double()
        positions, tilt = particles_case()
        with torch.no_grad():
            heads.particles.copy_(positions)
            heads.tilt.copy_(tilt)
        return heads

    @pytest.mark.parametrize("exact", [(), (1,), (0, 2), (0, 1, 2)])
    def test_weights_are_what_forward_multiplies_with(self, exact):
        q, k, v, mask = rows_case()
        heads = self.heads(exact)
        rows = heads.weights(q, k, mask)
        torch.testing.assert_close(heads(q, k, v, mask), rows @ v)
        softmax = softmax_rows(q, k, mask)
        for head in exact:
            torch.testing.assert_close(rows[:, head], softmax[:, head])

    def test_bias_reaches_exact_heads_only(self):
        q, k, v, mask = rows_case()
        bias = torch.arange(3.0).double().view(1, 3, 1, 1) * torch.arange(7)
        heads = self.heads((2,))
        with_bias, without = heads(q, k, v, mask, bias), heads(q, k, v, mask)
        assert torch.equal(with_bias[:, :2], without[:, :2])
        exact = softmax_rows(q, k, mask, bias)[:, 2] @ v[:, 2]
        torch.testing.assert_close(with_bias[:, 2], exact)

    def test_unknown_heads_and_maps(self):
        with pytest.raises(ParameterError, match="heads from 0 to 2; got 3"):
            LinearisedHeads(3, 4, exact_heads=[3])
        with pytest.raises(ParameterError, match="Use one of elu, favor, sigmoid2"):
            LinearisedHeads(3, 4, feature_map="cos2")


class TestTorchLayer:
    def test_all_heads_exact_is_torchs_layer(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        ours = LinearisedAttention(theirs, exact_heads=(0, 1))
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        for given in (None, padding):
            expected, weights = theirs(x, x, x, key_padding_mask=given)
            out, rows = ours(x, x, x, key_padding_mask=given)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(rows, weights)

    def test_causal_calls_are_refused(self):
        layer = LinearisedAttention(torch.nn.MultiheadAttention(8, 2), n_features=4)
        x, mask = torch.ones(3, 1, 8), torch.ones(3, 3).triu(1).bool()
        with pytest.raises(ParameterError, match="replace_attention"):
            layer(x, x, x, attn_mask=mask, is_causal=True)


class TestWindow:
    @pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
    @pytest.mark.parametrize("n, window", [(7, 2), (33, 8), (40, 3), (9, 8), (3, 8)])
    def test_blocks_are_the_quadratic_form_in_value_and_gradient(
        self, n, window, scale
    ):
        q, k, v, mask = rows_case(n=n)
        positions, tilt = particles_case()
        results = []
        for form in ("linear", "quadratic"):
            leaves = [(scale * x).requires_grad_() for x in (q, k)]
            leaves += [x.clone().requires_grad_() for x in (v, positions)]
            particles = HeadParticles(leaves[3], tilt, SoftmaxFeatures(), window)
            if form == "linear":
                out = particles.attend(*leaves[:3], mask)
            else:
                out = particles.rows(*leaves[:2], mask) @ leaves[2]
            (out.sin() * mask[:, None, :, None]).sum().backward()
            grads = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for leaf in leaves
            ]
            results.append([out.detach() * mask[:, None, :, None], *grads])
        for ours, twin in zip(*results, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-6, atol=1e-7)

    def test_a_wide_window_is_softmax(self):
        q, k, _, mask = rows_case(n=6)
        particles = HeadParticles(*particles_case(), SoftmaxFeatures(), 5)
        torch.testing.assert_close(particles.rows(q, k, mask), softmax_rows(q, k, mask))

    def test_features_that_are_far_too_large_leave_the_band(self):
        """What rounding leaves of the features must not be seen."""
        q, k, v, _ = rows_case(n=12, dtype=torch.float32)
        positions, tilt = particles_case(dtype=torch.float32)
        positions[..., 4] += 25.0  # the offset of the queries: exp(25) times as much
        v[..., 11, :] = 0
        particles = HeadParticles(positions, tilt, SoftmaxFeatures(), 11)
        out = particles.attend(q, k, v)
        torch.testing.assert_close(out, softmax_rows(q, k, None) @ v)
        longer = [torch.cat([x, x[:, :, -1:]], dim=2) for x in (q, k, v)]
        out = particles.attend(*longer)  # the first query sees one key by features
        expected = particles.rows(*longer[:2]) @ longer[2]
        kept = slice(2, None)
        torch.testing.assert_close(
            out[:, :, kept], expected[:, :, kept], rtol=1e-2, atol=1e-3
        )

    def test_scores_of_any_size_stay_finite(self):
        for scale in (1e-3, 30.0, 300.0):
            q, k, v, mask = rows_case(n=30, dtype=torch.float32)
            leaves = [(scale * x).requires_grad_() for x in (q, k)]
            case = particles_case(dtype=torch.float32)
            particles = HeadParticles(*case, SoftmaxFeatures(), 4)
            out = particles.attend(*leaves, v, mask)
            out.sum().backward()
            assert out.isfinite().all()
            assert all(leaf.grad.isfinite().all() for leaf in leaves)

    def test_padding_is_not_seen_whatever_stands_there(self):
        q, k, v, mask = rows_case(n=20)
        particles = HeadParticles(*particles_case(), SoftmaxFeatures(), 3)
        out = particles.attend(q, k, v, mask)
        alone = particles.attend(*(x[1:, :, :18] for x in (q, k, v)))
        torch.testing.assert_close(out[1:, :, :18], alone)
        for x in (k, v):
            x[1:, :, 18:] = math.nan
        again = particles.attend(q, k, v, mask)
        torch.testing.assert_close(again[:, :, :18], out[:, :, :18])

    def test_local_attention_alone(self):
        q, k, v, mask = rows_case(n=21)
        near = module.in_band(None, 21, 21, 4, q.device)
        scores = module.softmax_scores(q, k, None)
        scores = scores.masked_fill(~(near & mask[:, None, None]), -math.inf)
        rows = scores.softmax(dim=-1).nan_to_num()
        out = module.near_attention(q, k, v, mask, 4)
        torch.testing.assert_close(out, rows @ v)


class TestCompiledWindow:
    """The loop of near attention against its twins in torch."""

    @pytest.fixture(autouse=True)
    def _small_problems_too(self, monkeypatch):
        monkeypatch.setattr(module.compiled, "_FEWEST", 0)

    @staticmethod
    def case(shape, *, n_features=32, window=8, exact_length=0, seed=0):
        """Rows as projections give them, with padding in all sequences but one."""
        batch, heads, n, dim = shape
        source = torch.Generator().manual_seed(seed)

        def draw(*sizes):
            return torch.randn(sizes, generator=source)

        q, k, v = (draw(batch, n, heads, dim).transpose(1, 2) for _ in range(3))
        ends = torch.arange(n, max(0, n - 40 * batch), -40)[:batch]
        ends = torch.cat([ends, torch.ones(batch - len(ends), dtype=torch.long)])
        mask = torch.arange(n) < ends[:, None]
        positions = 0.4 * draw(heads, n_features, 2 * dim + 2)
        tilt = 0.3 * draw(heads, dim)
        reach = window, exact_length
        return (q, k, v, mask), HeadParticles(
            positions, tilt, SoftmaxFeatures(), *reach
        )

    @staticmethod
    def expected(rows, particles):
        """Multiply the values with the rows, written out in double precision."""
        q, k, v, mask = (x.double() if x.is_floating_point() else x for x in rows)
        exact = particles._replace(
            positions=particles.positions.double(), tilt=particles.tilt.double()
        )
        return (exact.rows(q, k, mask) @ v).float()

    @pytest.mark.parametrize("exact_length", [0, 20, 70])
    @pytest.mark.parametrize(
        "shape, n_features, window",
        [
            ((2, 3, 5, 16), 16, 8),
            ((3, 2, 33, 32), 32, 8),
            ((3, 2, 100, 32), 64, 3),
            ((2, 2, 130, 64), 48, 17),
            ((1, 1, 150, 16), 16, 32),
            ((2, 1, 97, 8), 16, 1),
        ],
    )
    def test_it_is_the_quadratic_form(self, shape, n_features, window, exact_length):
        rows, particles = self.case(
            shape, n_features=n_features, window=window, exact_length=exact_length
        )
        if shape[-1] % 16:  # values of 16 numbers beside keys of eight
            rows = *rows[:2], torch.cat([rows[2], rows[2]], dim=-1), rows[3]
        out = particles.attend_compiled(*rows)
        assert out is not None
        there = rows[3][:, None, :, None]
        expected = self.expected(rows, particles)
        torch.testing.assert_close(out * there, expected * there, rtol=1e-3, atol=1e-4)
        plain = particles.attend(*rows)
        torch.testing.assert_close(plain * there, out * there)

    def test_packed_sequences_are_padded_ones(self):
        rows, particles = self.case((3, 2, 120, 32), exact_length=50)
        expected = particles.attend(*rows)
        there = rows[3]
        packed = [x.transpose(1, 2)[there] for x in rows[:3]]
        bounds = [0, *there.sum(dim=1).cumsum(dim=0).tolist()]
        heads = LinearisedHeads(2, 32, n_features=32, window=8, exact_length=50)
        heads.fill(particles)
        out = heads.attend_packed(*packed, bounds)
        torch.testing.assert_close(out, expected.transpose(1, 2)[there])
        exact = LinearisedHeads(2, 32, n_features=32, window=8, exact_heads=[1])
        assert exact.attend_packed(*packed, bounds) is None

    def test_threads_give_equal_bits(self):
        rows, particles = self.case((3, 4, 300, 32), exact_length=250)
        threads, found = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append(particles.attend_compiled(*rows))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    def test_a_window_alone_is_local_attention(self):
        (q, k, v, mask), _ = self.case((2, 2, 90, 32))
        out = module.near_attention(q, k, v, mask, 9)
        near = module.in_band(None, 90, 90, 9, q.device)
        scores = module.softmax_scores(q, k, None)
        scores = scores.masked_fill(~(near & mask[:, None, None]), -math.inf)
        there = mask[:, None, :, None]
        expected = scores.softmax(dim=-1).nan_to_num() @ v
        torch.testing.assert_close(out * there, expected * there, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("exact_length", [0, 200])
    def test_sequences_without_tokens_give_zero(self, exact_length):
        (q, k, v, mask), particles = self.case((2, 2, 90, 32))
        particles = particles._replace(exact_length=exact_length)
        mask[1] = False
        out = particles.attend(q, k, v, mask)
        assert out.isfinite().all()
        assert not out[1].any()

    def test_padding_is_not_seen_whatever_stands_there(self):
        rows, particles = self.case((3, 2, 100, 32), exact_length=30)
        out = particles.attend_compiled(*rows)
        hidden = ~rows[3][:, None, :, None]
        k, v = (x.masked_fill(hidden, math.nan) for x in rows[1:3])
        again = particles.attend_compiled(rows[0], k, v, rows[3])
        assert torch.equal(out, again)

    @pytest.mark.parametrize("which", range(5))
    def test_what_is_not_finite_is_left_to_torch(self, which):
        (q, k, v, mask), particles = self.case((1, 2, 90, 32))
        positions = particles.positions.clone()
        changed = (q, k, positions, positions, v)[which]
        place = (0, 3, 40) if which == 3 else (0, 1, 3)
        value = 1e20 if which == 3 else math.nan
        (changed[0] if changed.dim() == 4 else changed)[place] = value
        particles = particles._replace(positions=positions)
        out = particles.attend_compiled(q, k, v, mask)
        if which == 4:  # values may be anything
            assert out is not None
            assert out[:, 0].isnan().any()
        else:
            assert out is None

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("which", [0, 1])
    @pytest.mark.parametrize("n_features", [0, 32])
    def test_softmax_of_what_is_not_finite_is_left_to_torch(
        self, value, which, n_features
    ):
        """In short sequences, and in a window without features."""
        rows, particles = self.case((1, 2, 90, 32), exact_length=90)
        rows[which][0, 1, 3, 5] = value
        if n_features:
            assert particles.attend_compiled(*rows) is None
        else:
            out = module.near_attention(*rows, 8)
            assert out[0, 1].isnan().any()

    def test_exponents_beyond_the_range_are_left_to_torch(self):
        """Their exponentials would be cut off, and nothing would tell."""
        rows, particles = self.case((1, 2, 90, 32))
        particles.positions[0, 1, -1] = 100.0
        assert particles.attend_compiled(*rows) is None
        particles.positions[0, 1, -1] = -20.0
        assert particles.attend_compiled(*rows) is not None

    def test_what_rounding_leaves_of_features_is_not_seen(self):
        """All keys but one are near, and the features of that one are nothing."""
        (q, k, v, _), particles = self.case((1, 2, 40, 32), window=38)
        positions = particles.positions.clone()
        positions[..., 32] += 25.0  # the offset of the queries: exp(25) times as much
        key = particles.key_tilt
        k[:, :, 39] = -30 * key / key.norm(dim=-1, keepdim=True) ** 2
        particles = particles._replace(positions=positions)
        out = particles.attend_compiled(q, k, v)
        near = softmax_rows(q[:, :, :1], k[:, :, :39], None) @ v[:, :, :39]
        torch.testing.assert_close(out[:, :, :1], near, rtol=1e-3, atol=1e-4)

    def test_gradients_are_those_of_torch(self):
        (q, k, v, mask), particles = self.case((2, 2, 60, 32), exact_length=40)
        q.requires_grad_()
        assert particles.attend_compiled(q, k, v, mask) is None
        with torch.no_grad():
            assert particles.attend_compiled(q, k, v, mask) is not None


class TestExactLength:
    @pytest.mark.parametrize("window", [0, 3])
    def test_short_sequences_attend_by_softmax(self, window):
        """In value and gradient, beside a longer one, and written out."""
        q, k, v, mask = rows_case(n=20)
        mask[1, 9:] = False
        particles = HeadParticles(*particles_case(), SoftmaxFeatures(), window, 10)
        found = []
        for form in ("linear", "quadratic"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            if form == "linear":
                out = particles.attend(*leaves, mask)
            else:
                out = particles.rows(*leaves[:2], mask) @ leaves[2]
            (out.sin() * mask[:, None, :, None]).sum().backward()
            there = out.detach() * mask[:, None, :, None]
            found.append([there, *(leaf.grad for leaf in leaves)])
        for ours, twin in zip(*found, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-6, atol=1e-7)
        short = softmax_rows(q, k, mask) @ v
        torch.testing.assert_close(found[0][0][1, :, :9], short[1, :, :9])
        features = particles._replace(exact_length=0).attend(q, k, v, mask)
        torch.testing.assert_close(found[0][0][0], features[0])

    def test_padding_changes_nothing(self):
        q, k, v, mask = rows_case(n=20)
        mask[1, 9:] = False
        particles = HeadParticles(*particles_case(), SoftmaxFeatures(), 3, 10)
        out = particles.attend(q, k, v, mask)
        alone = particles.attend(*(x[1:, :, :9] for x in (q, k, v)))
        torch.testing.assert_close(out[1:, :, :9], alone)
        for x in (k, v):
            x[1:, :, 9:] = math.nan
        again = particles.attend(q, k, v, mask)
        torch.testing.assert_close(again[1:, :, :9], alone)

    def test_nothing_beyond_it_is_softmax(self):
        heads = LinearisedHeads(3, 4, n_features=5, exact_length=7, exact_heads=[1])
        heads.double().draw(generator=torch.Generator().manual_seed(0))
        q, k, v, _ = rows_case(n=7)
        softmax = softmax_rows(q, k, None) @ v
        torch.testing.assert_close(heads(q, k, v), softmax)
        torch.testing.assert_close(heads.weights(q, k) @ v, softmax)
        q, k, v, _ = rows_case(n=8)
        out, softmax = heads(q, k, v), softmax_rows(q, k, None) @ v
        torch.testing.assert_close(out[:, 1], softmax[:, 1])
        assert (out - softmax)[:, [0, 2]].abs().max() > 0.01

    def test_exported_graphs_have_features_at_all_lengths(self):
        heads = LinearisedHeads(3, 4, n_features=8, window=2, exact_length=30).eval()
        heads.draw(generator=torch.Generator().manual_seed(0))
        q, k, v, mask = rows_case(n=12, dtype=torch.float32)
        free = torch.export.Dim.DYNAMIC
        shapes = *({2: free},) * 3, {1: free}, None
        graph = torch.export.export(heads, (q, k, v, mask, None), dynamic_shapes=shapes)
        q, k, v, mask = rows_case(n=20, dtype=torch.float32, seed=1)
        assert not torch.allclose(
            graph.module()(q, k, v, mask, None), heads(q, k, v, mask)
        )
        heads.exact_length = 0
        out = graph.module()(q, k, v, mask, None)
        torch.testing.assert_close(out, heads(q, k, v, mask))

    def test_it_is_a_count(self):
        with pytest.raises(ParameterError, match="`exact_length` must be"):
            LinearisedHeads(3, 4, exact_length=-1)
