"""Generated inputs: a finite answer of the right shape, or an error of ours.

Derandomised and few in `make test`; `make attack` sets ATTACK_EXAMPLES for more.
Estimators leave checks of arrays to scikit-learn, whose ValueError and TypeError count
as ours if they come from its validation, and not from the middle of a computation.
"""

import math
import os
import traceback
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from coulomb import (
    CoulombSampler,
    ImportanceSampler,
    MultipleKernelClassifier,
    OrthogonalSampler,
    Particles,
    TextClassifier,
)
from coulomb._support.errors import CoulombError
from coulomb.attention import KernelAttention, align, attention_layers
from coulomb.attention.ops.api import (
    kernel_attention,
    linear_attention,
    packed_attention,
)
from coulomb.attention.ops.decoding import decode_step, init_state, prefill
from coulomb.features import feature_maps
from coulomb.linearise import linearise
from coulomb.text.data import build_corpus
from coulomb.text.settings import SETTINGS, preset
from coulomb.text.tokens import train_vocabulary
from coulomb.theory.expressions import parse_expression

EXAMPLES = int(os.environ.get("ATTACK_EXAMPLES", "0"))
TRIED: Counter[str] = Counter()
VALIDATION = ("sklearn/utils/", "sklearn/base.py")


def examples(count):
    return settings(
        max_examples=max(count, EXAMPLES),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def attempt(kind, call):
    """Give what a call returns, or None if it was refused by a sentence."""
    TRIED[f"{kind}: tried"] += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn's of convergence
            return call()
    except CoulombError as error:
        TRIED["longest message"] = max(TRIED["longest message"], len(str(error)))
    except (ValueError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if not any(part in last.replace(os.sep, "/") for part in VALIDATION):
            raise
    TRIED[f"{kind}: refused"] += 1
    return None


@pytest.fixture(scope="module", autouse=True)
def count():
    yield
    for what in ("tried", "refused"):
        each = [number for name, number in TRIED.items() if name.endswith(f": {what}")]
        TRIED[f"all {what}"] = sum(each)
    lines = [f"{name} {number}" for name, number in sorted(TRIED.items())]
    print("\n".join(["", *lines]))


ODD = st.sampled_from(
    [
        *(None, True, "a", "auto", "scale", "", [], {}, b"x", object, 1j),
        *(-1, 0, 1, 2, 3, 7, 2**31, 10**12, 10**400, 10**6000),
        *(1.5, -0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan),
        *(np.int64(3), np.float32(0.5), np.array([1.0])),
    ]
)
VALUES = st.one_of(
    st.floats(-5, 5),
    st.sampled_from([0.0, 1e-320, 1e-150, 1e10, 1e150, 1e200, -1e300, 1e308]),
    st.sampled_from([math.nan, math.inf]),
)


@st.composite
def tables(draw):
    """Rows and labels: few or many, constant, extreme, missing, of any dtype."""
    rows = draw(st.sampled_from([25, 25, 20, 12, 5, 2, 1, 0]))
    columns = draw(st.sampled_from([4, 3, 2, 1, 4, 3, 2, 0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    X = rng.normal(size=(rows, columns))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        if X.size:
            place = draw(st.integers(0, X.size - 1))
            X.flat[place] = draw(VALUES)
    if columns and draw(st.integers(0, 4)) == 4:
        X[:, 0] = draw(VALUES)
    kind = draw(
        st.sampled_from([*["f8"] * 6, *["f4"] * 3, "list", "i8", "O", "U", "c16"])
    )
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        X = X.tolist() if kind == "list" else X.astype(kind)
    labels = [
        *([0, 1], [0, 1, 2], ["a", "b"], [0.5, 1.5, 2.5], [True, False], [-1, 1]) * 4,
        *([1], [0.5]),
        *([None, 1], ["a", 1], [math.nan, 1.0], [1e308, -1e308], [10**400, 1], [{}]),
        *([b"a", b"b"], [[0], [1]], [1j, 2j], [math.inf, 0.0]),
    ]
    pattern = draw(st.sampled_from(labels))
    count = rows + draw(st.sampled_from([*[0] * 9, 1]))
    y = (pattern * (count + 1))[:count]
    return X, y


def changes(**usual):
    """At most two arguments, since odd values hide each other, usual or odd."""
    options = {
        name: st.integers(0, 4).flatmap(
            lambda odd, x=x: ODD if odd == 4 else st.sampled_from(x)
        )
        for name, x in usual.items()
    }
    some = st.lists(st.sampled_from(sorted(usual)), max_size=2, unique=True)
    return some.flatmap(
        lambda names: st.fixed_dictionaries({name: options[name] for name in names})
    )


SHARED = {
    "n_components": [1, 5],
    "gamma": ["scale", 0.5],
    "standardize": [True, False],
    "random_state": [0, None],
}
ESTIMATORS = {
    CoulombSampler: (
        {"n_components": 4, "n_candidates": 16, "max_iter": 2},
        SHARED
        | {
            "coordinates": ["auto", "all", 1],
            "n_particles": [None, 8],
            "n_candidates": [None, 16],
            "inverse_temperature": ["auto", 10.0],
            "max_iter": [0, 2],
            "tol": [0.0, 0.1],
            "step_size": ["auto", 0.1],
            "interaction": ["coulomb"],
            "interaction_strength": [0.0, 1.0],
            "domain": ["space"],
            "clip": [1.0],
            "feature_map": ["fourier"],
            "batch_size": [None, "auto", 4],
            "labels": ["centred", "paper"],
            "resample": ["uniform", "gibbs"],
            "pursuit": ["auto", 0, 2],
            "stopping": ["settled", "held-out"],
            "target": ["auto", "classes", "number"],
        },
    ),
    ImportanceSampler: (
        {"n_components": 4, "n_candidates": 16},
        SHARED
        | {
            "n_candidates": [16],
            "divergence": [0.1, 0.0],
            "tol": [1e-6],
            "selection": ["top", "stratified"],
            "target": ["auto", "classes", "number"],
        },
    ),
    OrthogonalSampler: ({"n_components": 4}, SHARED),
}


@pytest.mark.parametrize("kind", ESTIMATORS, ids=lambda kind: kind.__name__)
def test_samplers(kind):
    usual, known = ESTIMATORS[kind]

    @examples(150)
    @given(tables(), changes(**known))
    def check(table, chosen):
        X, y = table

        def fit():
            sampler = kind(**{**usual, "random_state": 0, **chosen}).fit(X, y)
            return sampler.transform(X)

        out = attempt(kind.__name__, fit)
        if out is not None:
            assert out.shape[0] == len(X)
            assert np.isfinite(out).all()

    check()


@examples(150)
@given(
    tables(),
    changes(gammas=[(0.5, 1.0)], C=[1.0], standardize=[True], method=["uniform"]),
)
def test_multiple_kernels(table, chosen):
    X, y = table

    def fit():
        model = MultipleKernelClassifier(**chosen).fit(X, y)
        return model.predict(X), model.kernel(X)

    found = attempt("MultipleKernelClassifier", fit)
    if found is not None:
        assert len(found[0]) == len(X)
        assert np.isfinite(found[1]).all()


SIZES = st.sampled_from([*[1, 2, 3, 5] * 5, 0])
DTYPES = st.sampled_from(
    [torch.float32] * 12 + [torch.float64, torch.float16, torch.bfloat16, torch.int64]
)
SCALES = st.sampled_from([1.0, 1.0, 1.0, 0.0, 1e-30, 10.0, 1e4])


@st.composite
def operands(draw):
    """Queries, keys, values and particles that mostly fit one another."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    batch, heads, n, m, dim, dim_v = (draw(SIZES) for _ in range(6))
    shapes = [[batch, heads, n, dim], [batch, heads, m, dim], [batch, heads, m, dim_v]]
    shapes.append([heads, draw(SIZES), dim])
    if draw(st.integers(0, 5)) == 5:  # one wrong axis
        shape = shapes[draw(st.integers(0, 3))]
        shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZES)
    dtype = draw(DTYPES)
    found = [draw(SCALES) * torch.randn(*s, generator=generator) for s in shapes]
    q, k, v = (x.to(dtype) for x in found[:3])
    if draw(st.integers(0, 5)) == 5:
        k = k.to(draw(DTYPES))
    if draw(st.integers(0, 9)) == 9:
        q = draw(st.sampled_from([None, [1.0], 3, q.flatten(), np.ones(3)]))
    positions = found[3]
    phases = positions.sum(-1) if draw(st.booleans()) else None
    return q, k, v, Particles(positions, phases)


# Beyond these, exponents leave the range of the maps: q is of size 1e4, w of 1e4.
def bounded(*tensors):
    return all(float(x.abs().max()) < 100 if x.numel() else True for x in tensors)


def check_attention(kind, call, given):
    q, _, v, particles = given
    out = attempt(kind, call)
    if out is None:
        return
    assert out.shape[-1] == v.shape[-1]
    assert out.dtype == v.dtype
    if bounded(q.double(), given[1].double(), v.double(), particles.positions):
        assert out.isfinite().all()


MAPS = st.sampled_from([n for n in feature_maps if feature_maps.build(n).positive])


@examples(250)
@given(
    operands(), MAPS, st.booleans(), st.sampled_from(["auto", "linear", "quadratic"])
)
def test_kernel_attention(given, name, causal, form):
    def call():
        return kernel_attention(*given, name, causal=causal, form=form)

    check_attention("kernel_attention", call, given)


@examples(150)
@given(operands(), st.booleans())
def test_linear_attention(given, causal):
    q, k, v, _ = given
    features = [x.abs() if isinstance(x, torch.Tensor) else x for x in (q, k)]
    call = lambda: linear_attention(*features, v, causal=causal)  # noqa: E731
    check_attention("linear_attention", call, given)


@examples(150)
@given(operands(), MAPS, st.lists(st.integers(-1, 6), max_size=4))
def test_packed_attention(given, name, bounds):
    _, k, v, particles = given
    ends = [0, *bounds, k.shape[2]]
    rows = [x[0].transpose(0, 1) for x in (k, k, v) if len(x)]

    def call():
        return packed_attention(*rows, particles, name, torch.tensor(sorted(ends)))

    if len(rows) == 3:
        check_attention("packed_attention", call, (k, k, v, particles))


@examples(150)
@given(operands(), MAPS, ODD, ODD, st.booleans())
def test_decoding(given, name, batch, dim_v, odd):
    _, k, v, particles = given
    sizes = {"batch": k.shape[0], "heads": k.shape[1], "dim_v": v.shape[-1]}
    if odd:
        sizes |= {"batch": batch, "dim_v": dim_v}

    def call():
        state = init_state(particles, name, **sizes)
        state = prefill(k, v, particles, name, state=state)
        token = (x[:, :, 0] if x.shape[2] else x for x in (k, k, v))
        return decode_step(state, *token, particles, name)[0]

    check_attention("decoding", call, (k, k, v, particles))


@pytest.mark.parametrize("name", list(attention_layers))
def test_layers(name):
    @examples(60)
    @given(
        st.sampled_from([*[8] * 20, 7, 0, -1, 10**12, 2.0, None]),
        st.sampled_from([*[1, 2, 4] * 7, 3, 0, 10**12, "a"]),
        st.lists(SIZES, min_size=1, max_size=3),
        st.sampled_from([*[8] * 9, 7]),
        DTYPES,
        st.sampled_from([*[0, None] * 5, -1, 10**400]),
        st.booleans(),
    )
    def check(width, heads, shape, last, dtype, seed, causal):
        x = torch.randn(*shape, last).to(dtype)

        def call():
            layer = attention_layers.build(
                name, embed_dim=width, num_heads=heads, causal=causal, generator=seed
            )
            return layer(x, x, x, need_weights=False)[0]

        out = attempt(f"layer {name}", call)
        if out is not None:
            assert out.shape == x.shape
            assert out.isfinite().all()

    check()


@examples(200)
@given(st.sampled_from(sorted(SETTINGS)), ODD)
def test_text_settings(name, value):
    found = attempt("settings", lambda: preset("default", {name: value}))
    if found is not None:
        assert getattr(found, name) in (value, float("inf")) or value is True


@examples(150)
@given(
    st.one_of(
        st.lists(st.text(max_size=20), min_size=8, max_size=8),
        st.lists(st.tuples(st.text(), st.text()), min_size=8, max_size=8),
        st.lists(st.one_of(st.text(max_size=5), ODD), max_size=8),
    ),
    st.one_of(
        st.lists(st.sampled_from("ab"), min_size=8, max_size=8),
        st.lists(st.sampled_from([0, 1.5, True]), min_size=8, max_size=8),
        st.lists(st.one_of(st.sampled_from(["a", 0]), ODD), max_size=8),
    ),
    st.one_of(st.just(0.5), st.just(0.5), st.just(0.5), ODD),
)
def test_corpora(texts, labels, share):
    def call():
        return build_corpus("c", (texts, labels), validation_share=share)

    found = attempt("build_corpus", call)
    if found is not None:
        assert len(found.fingerprint()) == 64


@examples(60)
@given(st.lists(st.text(max_size=300), max_size=5), st.one_of(st.just(50), ODD))
def test_vocabularies(texts, size):
    clean = [text.encode(errors="replace").decode() for text in texts]
    found = attempt("vocabulary", lambda: train_vocabulary(clean, size=size))
    if found is not None:
        assert all(len(ids) <= 16 for ids in found.encode(clean, 16))


@examples(200)
@given(st.text("xyzr0123456789.+-*/()e,[]_ \x00\ud800", max_size=30), ODD)
def test_formulas(text, dim):
    formula = attempt("formula", lambda: parse_expression(text, 1))
    if formula is not None:
        assert formula(torch.ones(2, 1)).shape == (2,)
    attempt("formula", lambda: parse_expression("x", dim))


class Attentive(nn.Module):
    """One layer and a head, for Phase A."""

    def __init__(self, name):
        super().__init__()
        options = {"n_features": 4, "batch_first": True, "generator": 0}
        self.layer = KernelAttention(4, 2, feature_map=name, **options)

    def forward(self, x, key_mask=None):
        padding = None if key_mask is None else ~key_mask
        return self.layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]


@st.composite
def labelled_batches(draw):
    """Batches of inputs, at times a mask, and labels of all kinds."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rows, length = draw(st.sampled_from([*[6] * 8, 4, 2, 1, 0])), draw(SIZES)
    width = draw(st.sampled_from([*[4] * 15, 3]))
    x = draw(SCALES) * torch.randn(rows, length, width, generator=rng)
    x = x.to(draw(DTYPES))
    if x.numel() and x.is_floating_point() and draw(st.integers(0, 9)) == 9:
        x.view(-1)[0] = draw(st.sampled_from([math.nan, math.inf, 1e30]))
    labels = draw(
        st.sampled_from(
            [
                *[torch.arange(rows) % 2, torch.arange(rows) % 3] * 20,
                *(torch.arange(rows) / 3.0, (torch.arange(rows) % 2).tolist()),
                *(torch.zeros(rows).long(), torch.full((rows,), -100)),
                *(torch.arange(rows * length).view(rows, length) % 2 - 1, None, "ab"),
                *(torch.eye(rows), torch.ones(rows + 1), [10**400] * rows, [{}] * rows),
                torch.full((rows,), math.nan),
            ]
        )
    )
    mask = draw(st.sampled_from([None] * 9 + ["some"] * 3 + ["none", "odd"]))
    masks = {
        "some": torch.arange(length).expand(rows, length) < 2,
        "none": torch.zeros(rows, length, dtype=torch.bool),
        "odd": [True],
    }
    batch = (x, labels) if mask is None else (x, masks[mask], labels)
    many = [[batch], [batch] * 3, [], None, [batch, (x,)], [(x, None, None, labels)]]
    return draw(st.sampled_from([many[0]] * 20 + [many[1]] * 20 + many[2:]))


@examples(150)
@given(
    labelled_batches(),
    st.sampled_from(["favor", "softmaxfeat", "softplus"]),
    changes(
        objective=["centred", "within-class", "target"],
        level=["sequence", "token", "layer", "head"],
        pool=["mean", "cls"],
        output=[None, ""],
        layers=[None, ("layer",)],
        sampler=["langevin", "adam"],
        step_size=[0.1],
        inverse_temperature=[math.inf, 1e3],
        drift=["N", "plain"],
        clip=[1.0],
        strength=[0.0, 0.1],
        max_steps=[2],
        tol=[0.0, 0.1],
        patience=[None, 1],
        record_every=[1],
        watched=[1, 4],
        also=[(), ("in_proj",)],
        also_step_size=[0.1],
        held_out=[None, 0.4],
        seed=[0, 1],
    ),
)
def test_phase_a(batches, name, chosen):
    """Particles are finite, or nothing was written to the model."""
    model = Attentive(name)
    before = model.layer.particles.detach().clone()

    def call():
        usual = {"max_epochs": 2, "held_out": None}
        return align(model, batches, **{**usual, **chosen})

    found = attempt("align", call)
    after = model.layer.particles.detach()
    if found is None:
        assert torch.equal(after, before)
    else:
        assert after.isfinite().all()
        assert found.summary()


TEACHERS = {}


def teacher(heads, width):
    if (heads, width) not in TEACHERS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inner = nn.TransformerEncoderLayer(width, heads, 8, batch_first=True)
            TEACHERS[heads, width] = nn.TransformerEncoder(
                inner, 2, enable_nested_tensor=False
            )
    return TEACHERS[heads, width]


@st.composite
def encoders(draw):
    """A small encoder, and what makes tensors of texts, at times not of its kind."""
    model = teacher(draw(st.sampled_from([1, 2])), 4)
    width = draw(st.sampled_from([*[4] * 12, 3]))
    scale, dtype = draw(SCALES), draw(DTYPES)
    kind = draw(st.sampled_from([*["good"] * 12, "none", "list", "empty", "raises"]))

    def tokenizer(texts):
        if kind != "good":
            return {"none": None, "list": [1], "empty": {}}[kind]
        rng = torch.Generator().manual_seed(len(texts))
        x = scale * torch.randn(len(texts), 5, width, generator=rng)
        return {"src": x.to(dtype)}

    if kind == "raises":
        return model, draw(st.sampled_from([None, 3, "bert"]))
    return draw(st.sampled_from([*[model] * 12, None, "bert", nn.Linear(4, 4)])), (
        tokenizer
    )


@examples(60)
@given(
    encoders(),
    st.one_of(
        st.just(["a b", "c", "d e f", "g"] * 4),
        st.lists(st.one_of(st.text(max_size=5), ODD), max_size=3),
        ODD,
    ),
    changes(
        n_features=[2, 4],
        feature_map=["softmaxfeat", "favor"],
        objective=["kl", "mse", "alignment"],
        start=["auto"],
        shared=[True, False],
        steps=[0, 2],
        step_size=[0.02],
        inverse_temperature=[math.inf, 1e3],
        repulsion=[0.0, 0.1],
        check_every=[1],
        patience=[1],
        distil_steps=[0, 1],
        distil_step_size=[0.01],
        pooling=["mean", None],
        max_tokens=[64],
        max_length=[None, 4],
        batch_tokens=[16],
        rows=[4],
        long_share=[0.5, 1.0],
        keep_exact=[(), 1, [0], [(1, 0)]],
        seed=[0, 1],
    ),
)
def test_linearised_encoders(given, texts, chosen):
    model, tokenizer = given
    quick = {"n_features": 2, "steps": 1, "distil_steps": 0, "measure": False}

    def call():
        fast = linearise(model, tokenizer, texts, **{**quick, **chosen})
        with torch.no_grad():
            return fast(tokenizer(["a", "b"])["src"])

    out = attempt("linearise", call)
    if out is not None:
        assert out.shape == (2, 5, 4)
        assert out.isfinite().all()


TEXT = st.one_of(
    st.sampled_from(["a fine film", "a dull film", "fine", "", " ", "\x00", "x" * 500]),
    st.text(max_size=12),
)
SMALL = {
    "width": 8, "ffn_width": 8, "n_features": 4, "n_layers": 1, "max_length": 8,
    "epochs": 1, "min_steps": 0, "batch_size": 8, "vocabulary_size": 60,
    "align_epochs": 0.0,
}  # fmt: skip


@examples(40)
@given(
    st.one_of(
        st.lists(TEXT, min_size=12, max_size=12),
        st.lists(TEXT, min_size=12, max_size=12),
        st.lists(st.tuples(TEXT, TEXT), min_size=12, max_size=12),
        st.lists(st.one_of(TEXT, ODD), max_size=12),
        ODD,
    ),
    st.one_of(
        st.sampled_from([["a", "b"] * 6, [0, 1, 2] * 4, [True, False] * 6]),
        st.lists(st.one_of(st.sampled_from(["a", 0]), ODD), max_size=12),
        ODD,
    ),
    changes(
        attention=[None, "vanilla-softplus", "softmax"],
        preset=["default", "pairs"],
        vocabulary=[None],
        validation_share=[0.2, 0.5],
        random_state=[0],
        settings=[{}, {"align_epochs": 1.0}, {"pooling": "cls"}],
    ),
    st.lists(st.one_of(TEXT, TEXT, ODD), min_size=1, max_size=3),
)
def test_text_classifiers(texts, labels, chosen, asked):
    given = chosen.get("settings", {})
    if isinstance(given, dict):
        chosen["settings"] = SMALL | given

    def call():
        model = TextClassifier(**chosen).fit(texts, labels)
        pairs = model.predictor_.config.data["pairs"]
        usual = [("a", "b")] if pairs else ["a fine film"]
        return model, model.predict_proba(usual)

    found = attempt("TextClassifier", call)
    if found is not None:
        model, chances = found
        assert chances.shape == (1, len(model.classes_))
        assert np.allclose(chances.sum(1), 1)
        more = attempt("TextClassifier", lambda: model.predict_proba(asked))
        if more is not None:
            assert more.shape == (len(asked), len(model.classes_))
            assert np.isfinite(more).all()
