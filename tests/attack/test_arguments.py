"""Bad arguments: one sentence that names the argument and the rule, before work."""

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from coulomb import (
    CoulombClassifier,
    CoulombRegressor,
    CoulombSampler,
    ImportanceSampler,
    MultipleKernelClassifier,
    OrthogonalSampler,
    Particles,
    TextClassifier,
)
from coulomb._support.errors import CoulombError
from coulomb.attention import EncoderSettings, KernelAttention, align
from coulomb.attention.ops.api import (
    kernel_attention,
    linear_attention,
    packed_attention,
)
from coulomb.attention.ops.decoding import decode_step, init_state, prefill
from coulomb.cli.main import app
from coulomb.cli.output import read_lines
from coulomb.experiments.runner import dask_client
from coulomb.linearise import linearise
from coulomb.text.tokens import train_vocabulary
from coulomb.theory import Scaling
from coulomb.theory.expressions import parse_expression

HUGE = 10**12
BEYOND = 10**400  # of no float
LONG = 10**6000  # of no decimal string, as Python has it

X = np.random.default_rng(0).normal(size=(40, 4))
Y = (X[:, 0] > 0).astype(int)
TEXTS, LABELS = ["a fine film", "a dull film"] * 10, ["good", "bad"] * 10
PAIRS = [("a fine", "film"), ("a dull", "film")] * 10
SMALL = {"width": 16, "n_features": 8, "min_steps": 3, "epochs": 1}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


Q, CLOUD = draw(1, 2, 5, 4), Particles(draw(2, 8, 4))
ROWS = Q[0].transpose(0, 1)  # packed
TOKEN = Q[:, :, 0]
TOKENS = draw(2, 5, 8)


def mixed(*labels):
    return np.array([*labels] * 40, dtype=object)[:40]


def sample(data=(X, Y), **settings):
    return CoulombSampler(8, **{"random_state": 0, **settings}).fit(*data)


def classify(y):
    return CoulombClassifier(8).fit(X, y)


def texts(rows=TEXTS, labels=LABELS, **options):
    changed = {**SMALL, **options.pop("settings", {})}
    return TextClassifier(settings=changed, **options).fit(rows, labels)


def attend(q=Q, k=Q, v=Q, particles=CLOUD, *options, **named):
    return kernel_attention(q, k, v, particles, "favor", *options, **named)


def layer(x=TOKENS, k=None, v=None, **options):
    attention = KernelAttention(8, 2, n_features=16, batch_first=True, generator=0)
    k, v = (x if y is None else y for y in (k, v))
    return attention(x, k, v, **options)


def state(particles=CLOUD, **sizes):
    return init_state(
        particles, "favor", **{"batch": 1, "heads": 2, "dim_v": 4, **sizes}
    )


class Tiny(nn.Module):
    feature_map = "favor"

    def __init__(self):
        super().__init__()
        self.particles = nn.Parameter(draw(1, 4, 2))

    def forward(self, x):
        x = x.unsqueeze(1)
        return kernel_attention(x, x, x, Particles(self.particles), "favor").squeeze(1)


def run_align(labels=(0, 1, 0, 1), rows=4, model=None, **options):
    batches = [(draw(4, 3, 2)[:rows], labels)]
    return align(model or Tiny(), batches, **{"held_out": None, **options})


def lin(*given, **options):
    torch.manual_seed(0)
    inner = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    usual = (
        nn.TransformerEncoder(inner, 2, enable_nested_tensor=False),
        lambda texts: {"src": torch.ones(len(texts), 6, 8)},
        ["a b"] * 8,
    )
    chosen = [b if a == "usual" else a for a, b in zip(given, usual, strict=False)]
    quick = {"steps": 2, "distil_steps": 0, "n_features": 4, "measure": False}
    return linearise(*chosen, *usual[len(chosen) :], **{**quick, **options})


# name: call, words of the message
CASES = {
    # labels of estimators
    "y None": (lambda: sample((X, mixed(None))), "`y` must have a label in every row"),
    "y some None": (lambda: sample((X, mixed(0, 1, None))), "got None in row 2"),
    "y mixed": (lambda: sample((X, mixed(0, "a"))), "only numbers or only strings"),
    "y dicts": (lambda: sample((X, [{}] * 40)), "`y` must hold numbers of at most"),
    "classes None": (
        lambda: classify(mixed(0, None)),
        "`y` must have a label in every",
    ),
    "classes mixed": (lambda: classify(mixed(0, "a")), "only numbers or only strings"),
    "y of no float": (
        lambda: CoulombRegressor(8).fit(X, mixed(LONG, 1)),
        "`X` and `y` must fit into float64",
    ),
    "X of no float": (
        lambda: CoulombSampler(8).fit(mixed(LONG, 1)[:, None], Y),
        "`X` and `y` must fit into float64",
    ),
    "y NaT": (
        lambda: sample((X, np.array(["2020-01-01", "NaT"] * 20, dtype="M8[D]"))),
        "`y` must h",
    ),
    "y words as numbers": (
        lambda: sample((X, np.array(["a", "b"] * 20)), target="number"),
        "`y` must hold numbers with target='number'; got np.str_",
    ),
    "y long": (lambda: sample((X, mixed(LONG, 1))), "got a number of 19932 bits"),
    "classes": (
        lambda: CoulombSampler(8).partial_fit(X, Y, classes=[0, None, "a"]),
        "`classes` must",
    ),
    "importance y": (
        lambda: ImportanceSampler(8, n_candidates=50).fit(X, mixed(0, "a")),
        "`y` must hold only numbers",
    ),
    "multiple kernels y": (
        lambda: MultipleKernelClassifier().fit(X, mixed(0, None)),
        "`y` must have a label",
    ),
    "jobs": (
        lambda: CoulombClassifier(8, n_jobs=0).fit(X, Y),
        "`n_jobs` must be at least 1; got 0",
    ),
    "jobs a fraction": (
        lambda: CoulombClassifier(8, n_jobs=1.5).fit(X, Y),
        "`n_jobs` must be a whole number",
    ),
    # seeds
    "seed -1": (lambda: sample(random_state=-1), "`random_state` must be at least 0"),
    "seed 2**32": (lambda: sample(random_state=2**32), "must be at most 4294967295"),
    "seed long": (lambda: sample(random_state=LONG), "`random_state` must be at most"),
    "seed name": (lambda: sample(random_state="a"), "`random_state` must be None"),
    "seed fraction": (lambda: sample(random_state=1.5), "`random_state` must be None"),
    "seed generator": (
        lambda: sample(random_state=np.random.default_rng(0)),
        "a numpy.random.RandomState; got Generator",
    ),
    "orthogonal seed": (
        lambda: OrthogonalSampler(8, random_state=-1).fit(X),
        "`random_state` must be at least 0",
    ),
    "text seed": (lambda: texts(random_state=-1), "`random_state` must be at least 0"),
    "text seed None": (lambda: texts(random_state=None), "`random_state` must be a wh"),
    "layer seed": (lambda: KernelAttention(8, 2, generator=BEYOND), "`generator` must"),
    "align seed": (lambda: run_align(seed=-1), "`seed` must be at least 0"),
    "align seed None": (lambda: run_align(seed=None), "`seed` must be a whole number"),
    "linearise seed": (lambda: lin(seed=LONG), "`seed` must be at most"),
    # counts
    "components": (lambda: CoulombSampler(HUGE).fit(X, Y), "`n_components` must be at"),
    "components 2e9": (
        lambda: OrthogonalSampler(2 * 10**9).fit(np.ones((2, 10**5))),
        "`n_components` must fit into memory",
    ),
    "components long": (lambda: CoulombSampler(LONG).fit(X, Y), "`n_components` must"),
    "particles": (lambda: sample(n_particles=HUGE), "`n_particles` must be at most"),
    "candidates": (lambda: sample(n_candidates=HUGE), "`n_candidates` must be at most"),
    "steps": (lambda: sample(max_iter=HUGE), "`max_iter` must be at most 2147483647"),
    "batch": (lambda: sample(batch_size=HUGE), "`batch_size` must be at most"),
    "orthogonal": (lambda: OrthogonalSampler(HUGE).fit(X), "`n_components` must be at"),
    "importance": (
        lambda: ImportanceSampler(8, n_candidates=HUGE).fit(X, Y),
        "`n_candidates` must be at most",
    ),
    "layer features": (
        lambda: KernelAttention(8, 2, n_features=HUGE),
        "`n_features` m",
    ),
    "layer width": (lambda: KernelAttention(HUGE, 2), "`embed_dim` must be at most"),
    "layer memory": (lambda: KernelAttention(2**30, 2), "`embed_dim` must fit into m"),
    "encoder": (lambda: EncoderSettings(2**30, 2, width=2**20), "must fit into memory"),
    "layers": (lambda: texts(settings={"n_layers": 10**7}), "`n_layers` must be at mo"),
    "vocabulary": (
        lambda: texts(settings={"vocabulary_size": HUGE}),
        "`vocabulary_size` must be at most 1000000",
    ),
    "width": (lambda: texts(settings={"width": HUGE}), "`width` must be at most"),
    "epochs": (lambda: texts(settings={"epochs": HUGE}), "`epochs` must be at most"),
    "lr": (lambda: texts(settings={"lr": BEYOND}), "`lr` must be finite; got a numb"),
    "vocabulary of texts": (
        lambda: train_vocabulary(TEXTS, size=HUGE),
        "`size` must be at most 1000000",
    ),
    "align epochs": (
        lambda: run_align(max_epochs=HUGE),
        "`max_epochs` must be at most",
    ),
    "align records": (lambda: run_align(record_every=0), "`record_every` must be at l"),
    "linearise features": (
        lambda: lin(n_features=HUGE),
        "`n_features` must be at most",
    ),
    # numbers that were taken silently
    "coordinates": (
        lambda: sample(coordinates=99),
        "at most the 4 columns of `X`; got",
    ),
    "strength": (
        lambda: sample(interaction_strength=1e300),
        "`interaction_strength` must be at most 1e+08; got 1e+300",
    ),
    "strength of no float": (
        lambda: sample(interaction_strength=BEYOND),
        "`interaction_strength` must be finite; got a number of 1329 bits",
    ),
    "gamma": (
        lambda: OrthogonalSampler(8, gamma=1e308).fit(X),
        "`gamma` must be at mo",
    ),
    "align strength": (lambda: run_align(strength=1e300), "`strength` must be at most"),
    # operands
    "no particles": (
        lambda: attend(particles=Particles(draw(2, 0, 4))),
        "at least one p",
    ),
    "no features": (
        lambda: linear_attention(Q[..., :0], Q[..., :0], Q),
        "`phi_q` must h",
    ),
    "no width": (lambda: attend(Q[..., :0], Q[..., :0]), "`q` must have at least one"),
    "no heads": (
        lambda: attend(Q[:, :0], Q[:, :0], Q[:, :0]),
        "`q` must have at least",
    ),
    "no particles, packed": (
        lambda: packed_attention(
            ROWS, ROWS, ROWS, Particles(draw(0, 4)), "favor", torch.tensor([0, 5])
        ),
        "at least one particle",
    ),
    "no particles, decoding": (
        lambda: state(Particles(draw(2, 0, 4))),
        "at least one p",
    ),
    "no particles, prefill": (
        lambda: prefill(Q, Q, Particles(draw(0, 4)), "favor"),
        "at least one particle",
    ),
    "particles None": (lambda: attend(particles=None), "`particles` must be coulomb.P"),
    "particles a tensor": (
        lambda: attend(particles=Q),
        "`particles` must be coulomb.P",
    ),
    "phases a list": (
        lambda: attend(particles=CLOUD._replace(phases=[1.0])),
        "`particles.phases` must be a floating-point tensor; got list",
    ),
    "two precisions": (lambda: attend(k=Q.double()), "`q` and `k` must have one dtype"),
    "mask a list": (
        lambda: attend(Q, Q, Q, CLOUD, [True]),
        "`key_mask` must be a bool",
    ),
    "bounds a list": (
        lambda: packed_attention(ROWS, ROWS, ROWS, CLOUD, "favor", [0, 5]),
        "`cu_seqlens` must be a tensor; got list",
    ),
    "state batch": (lambda: state(batch=-1), "`batch` must be at least 0; got -1"),
    "state heads": (lambda: state(heads=0), "`heads` must be at least 1; got 0"),
    "state of more heads": (lambda: state(heads=3), "`heads` must be 2, as many as"),
    "state fraction": (lambda: state(dim_v=1.5), "`dim_v` must be a whole number"),
    "state memory": (lambda: state(batch=2**31 - 1), "must fit into memory"),
    "state of others": (
        lambda: decode_step(state(batch=3), TOKEN, TOKEN, TOKEN, CLOUD, "favor"),
        "`state` must have sums of shape (1, 2, 5, 8)",
    ),
    "prefill of others": (
        lambda: prefill(Q, Q, CLOUD, "favor", state=state(batch=3)),
        "`state` must have sums",
    ),
    "token of numbers": (
        lambda: decode_step(state(), TOKEN.long(), TOKEN, TOKEN, CLOUD, "favor"),
        "`q_t` must be a floating-point tensor; got torch.int64",
    ),
    "token None": (
        lambda: decode_step(state(), TOKEN, TOKEN, None, CLOUD, "favor"),
        "`v_t` must be a floating-point tensor; got NoneType",
    ),
    # layers
    "width of input": (
        lambda: layer(TOKENS[..., :7]),
        "`query` must have 8 coordinates",
    ),
    "width of values": (lambda: layer(v=TOKENS[..., :7]), "`value` must have 8 coord"),
    "whole numbers": (lambda: layer(TOKENS.long()), "`query` must be a floating-point"),
    "double": (lambda: layer(TOKENS.double()), "the layer's dtype, torch.float32; got"),
    "None": (lambda: layer(None, TOKENS, TOKENS), "`query` must be a floating-point t"),
    "an array": (lambda: layer(TOKENS.numpy()), "a floating-point tensor; got ndarray"),
    "padding a list": (
        lambda: layer(key_padding_mask=[True]),
        "`key_padding_mask` must",
    ),
    "prefill width": (
        lambda: KernelAttention(8, 2).prefill(TOKENS[..., :7]),
        "`x` must have 8 coordinates",
    ),
    "prefill axes": (
        lambda: KernelAttention(8, 2).prefill(TOKENS[0]),
        "`x` must have shape (batch, length, embed_dim)",
    ),
    "decode axes": (
        lambda: KernelAttention(8, 2).decode(TOKENS),
        "`x` must have shape (batch, embed_dim)",
    ),
    "decode another batch": (
        lambda: KernelAttention(8, 2).decode(TOKENS[:1, 0], state(batch=2)),
        "`state` must have sums",
    ),
    # align
    "align words": (
        lambda: run_align(["a", "b", "a", "b"]),
        "`labels` must be a tensor",
    ),
    "align array": (
        lambda: run_align(np.array(["a", "b", "a", "b"])),
        "Number the classes",
    ),
    "align None": (lambda: run_align([None] * 4), "`labels` must be a tensor of class"),
    "align one class": (
        lambda: run_align([1] * 4),
        "`batches` must hold different lab",
    ),
    "align one row": (
        lambda: run_align([1], rows=1),
        "have only [1]. Shuffle the rows",
    ),
    "align no labels": (lambda: run_align([-100] * 4), "have only []"),
    "align complex": (
        lambda: run_align(torch.tensor([1j, 0, 1, 2])),
        "`labels` must be a tensor of class numbers or real targets",
    ),
    "align NaN": (lambda: run_align([0.0, 1, 2, np.nan]), "`labels` must be finite"),
    "align no model": (lambda: run_align(model="m"), "`model` must be a torch module"),
    # linearise
    "linearise model": (lambda: lin(None), "`model` must be a torch module"),
    "linearise tokenizer": (
        lambda: lin("usual", None),
        "`tokenizer` must be a tokenize",
    ),
    "linearise texts": (
        lambda: lin("usual", "usual", None),
        "`texts` must be a sequence",
    ),
    "linearise None": (lambda: lin("usual", "usual", [None] * 8), "got None in it"),
    "linearise mapping": (
        lambda: lin("usual", lambda texts: None),
        "`tokenizer` must return the keyword arguments",
    ),
    "linearise empty": (lambda: lin("usual", lambda texts: {}), "each text; got {}"),
    "linearise number": (
        lambda: lin("usual", lambda texts: {"src": 3}),
        "a row for each text; got {'src': 3}",
    ),
    "linearise rows": (
        lambda: lin("usual", lambda texts: {"src": torch.ones(3, 4, 8)}),
        "`tokenizer` must return the keyword arguments",
    ),
    "keep 99": (lambda: lin(keep_exact=99), "`keep_exact` must be at most 4; got 99"),
    "keep -1": (lambda: lin(keep_exact=-1), "`keep_exact` must be at least 0"),
    "keep layer": (
        lambda: lin(keep_exact=[99]),
        "`keep_exact` must name layers from 0 to 1; got 99",
    ),
    "keep head": (
        lambda: lin(keep_exact=[(0, 99)]),
        "`keep_exact` must name heads from 0 to 1; got 99",
    ),
    "keep None": (
        lambda: lin(keep_exact=None),
        "`keep_exact` must be a number of heads",
    ),
    "keep name": (
        lambda: lin(keep_exact="all"),
        "`keep_exact` must be a number of hea",
    ),
    # texts
    "surrogate": (
        lambda: texts(["a \ud800", *TEXTS[1:]]),
        "Row 1: a text must be valid",
    ),
    "text long": (
        lambda: texts(["a" * (2**22 + 1), *TEXTS[1:]]),
        "Row 1: a text must have at most 4,194,304 characters; got 4,194,305.",
    ),
    "surrogate label": (lambda: texts(labels=["\ud800", "b"] * 10), "valid Unicode"),
    "label None": (lambda: texts(labels=[None] * 20), "Row 1: the label is missing"),
    "labels None": (lambda: texts(labels=None), "`y` must be a list"),
    "texts None": (lambda: texts(rows=None), "`X` must be a list"),
    "labels mixed": (
        lambda: texts(labels=[1, "a"] * 10),
        "only numbers or only strings",
    ),
    "labels dicts": (
        lambda: texts(labels=[{}, {}] * 10),
        "a label must be a string or a number",
    ),
    "labels long": (lambda: texts(labels=[LONG, 1] * 10), "got a number of 19932 bits"),
    "texts and pairs": (
        lambda: texts([PAIRS[0], *TEXTS[1:]]),
        "Row 2: a pair is needed",
    ),
    "processes": (
        lambda: dask_client("local:" + "9" * 5000).__enter__(),
        "`scheduler` must be local:N, N processes up to 1024",
    ),
    # formulas
    "power": (lambda: Scaling(1.0, power=1e300), "`power` must be at most 16"),
    "1/0": (
        lambda: parse_expression("1/0", 1),
        "`expression` must be finite somewhere",
    ),
    "log(-1)": (lambda: parse_expression("log(-1)", 1), "must be finite somewhere"),
    "9**9**9": (lambda: parse_expression("9**9**9", 1), "must be finite somewhere"),
    "no formula": (lambda: parse_expression(None, 1), "`expression` must be a string"),
    "no dimension": (lambda: parse_expression("1", 0), "`dim` must be at least 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name):
    call, words = CASES[name]
    with pytest.raises(CoulombError) as caught:
        call()
    message = str(caught.value)
    assert words in message
    assert message.endswith(".")
    assert len(message) < 400


def test_pairs_and_single_texts_are_told_apart_after_training(tmp_path):
    single, pairs = texts(), texts(PAIRS, preset="pairs")
    for model, wrong in ((single, PAIRS[:1]), (pairs, TEXTS[:1])):
        with pytest.raises(CoulombError, match=r"Row 1: (one text|a pair) is needed"):
            model.predict(wrong)
    with pytest.raises(
        CoulombError, match=r"`texts` must be a list|`X` must be a list"
    ):
        single.predict(None)
    pairs.save(tmp_path / "pairs")
    with pytest.raises(CoulombError, match="Row 1: a pair is needed"):
        TextClassifier.load(tmp_path / "pairs").predict(TEXTS[:1])


def test_long_words_leave_the_vocabulary_as_it_was():
    """A word of 100,000 characters is unknown, so that it has no pieces to learn."""
    plain = train_vocabulary(TEXTS, size=200)
    added = train_vocabulary([*TEXTS, "film" * 25_000], size=200)
    assert added.to_json() == plain.to_json()
    assert added.encode(["film" * 25_000], 8)[0].tolist()[1] == added.unknown
    # A long run without spaces is kept where it falls into shorter words.
    address = "/".join(["film"] * 40)
    assert train_vocabulary([address], size=200).encode(["film"], 8)[0].size == 3


@pytest.mark.parametrize(
    "verb, option, value",
    [
        (["train"], "--threads", "0"),
        (["train"], "--threads", "100000"),
        (["reproduce", "noise"], "--jobs", "1000000000000"),
        (["demo"], "--trials", "1000000000000"),
    ],
)
def test_counts_of_the_command_line(verb, option, value):
    found = CliRunner().invoke(app, [*verb, option, value])
    assert found.exit_code == 2
    assert option in found.output
    assert not isinstance(found.exception, CoulombError | OSError | RuntimeError)


def test_a_line_without_an_end_is_not_read(tmp_path):
    (tmp_path / "texts.txt").write_bytes(b"a film\n" + b"\0" * 2**24)
    lines = read_lines(tmp_path / "texts.txt")
    assert next(lines) == "a film"
    with pytest.raises(CoulombError, match="line 2 has 16 MiB or more"):
        next(lines)
