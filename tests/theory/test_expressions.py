import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coulomb._support.errors import ParameterError
from coulomb.theory import parse_expression


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2*x**2", lambda x, y: 2 * x**2),
        ("-x + y/2 - 1.5e-1", lambda x, y: -x + y / 2 - 0.15),
        (
            "cos(pi*x)*exp(-r)",
            lambda x, y: math.cos(math.pi * x) * math.exp(-math.hypot(x, y)),
        ),
        ("sqrt(abs(x)) + log(e)", lambda x, y: math.sqrt(abs(x)) + 1),
        ("3", lambda x, y: 3.0),
    ],
)
def test_formulas_are_evaluated(text, expected):
    places = torch.tensor([[0.3, -0.7], [-1.2, 0.4]], dtype=torch.float64)
    values = parse_expression(text, 2)(places)
    for value, (x, y) in zip(values.tolist(), places.tolist(), strict=True):
        assert value == pytest.approx(expected(x, y), rel=1e-12)


def test_formulas_have_gradients():
    place = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(parse_expression("x**3", 1)(place).sum(), place)
    assert slope.item() == pytest.approx(0.75)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "x.__class__",
        "(lambda: 1)()",
        "[x for x in y]",
        "x if x else y",
        "open('a')",
        "x[0]",
        "'a'",
        "True",
        "1e200",
        "x == 1",
        "cos(x, x)",
        "cos(x=1)",
        "eval('1')",
        "f'{x}'",
        "x; x",
        "",
        "2*",
        "x := 3",
        "y",
        "x" * 2000,
        "(" * 300 + "x" + ")" * 300,
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ParameterError, match="`expression`"):
        parse_expression(text, 1)


def test_long_sums_are_read():
    text = "1" + "+1" * 490
    assert parse_expression(text, 1)(torch.zeros(1, 1)).item() == 491


def test_towers_of_powers_do_not_grow_for_ever():
    """They are infinite at once, and nothing that is nowhere finite is taken."""
    with pytest.raises(ParameterError, match="must be finite somewhere"):
        parse_expression("9**9**9**9", 1)


@given(st.text(max_size=40))
def test_no_text_escapes(text):
    try:
        function = parse_expression(text, 1)
    except ParameterError:
        return
    assert function(torch.ones(2, 1)).shape == (2,)
