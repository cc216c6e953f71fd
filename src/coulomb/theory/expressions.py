"""Functions typed as text, such as `2*x**2 - cos(3*y)`, read without running code.

The text is parsed to a syntax tree of which only numbers, coordinates, arithmetic and a
few functions are let through; nothing else is evaluated.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError, ParameterTypeError, shown
from coulomb.theory.system import Function

_CONSTANTS = {"pi": math.pi, "e": math.e}
_COORDINATES = "xyz"
_LONGEST = 1000  # characters
_LARGEST = 1e100  # larger numbers overflow
# Where a formula is tried: it must be arithmetic, and finite at one of them.
_PLACES = torch.tensor([-1.0, 1.0]).outer(torch.logspace(-3, 4, 43)).flatten().double()
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}


def parse_expression(text: str, dim: int) -> Function:
    """Turn a typed formula into a function of positions.

    Known are numbers, `x`, `y`, `z` (as far as there are dimensions), `r = |w|`, `pi`,
    `e`, the operators `+ - * / **` and abs, cos, cosh, exp, log, sin, sqrt, tanh.

    Parameters
    ----------
    text
        The formula.
    dim
        Number of coordinates.

    Returns
    -------
    Function
        Takes positions `(..., dim)` and returns values `(...)`.

    Examples
    --------
    >>> parse_expression("2*x**2 - 1", 1)(torch.tensor([[3.0]]))
    tensor([17.])
    >>> parse_expression("x.__class__", 1)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `expression` may only ...
    """
    if not isinstance(text, str):
        raise ParameterTypeError(f"`expression` must be a string; got {shown(text)}.")
    check_count("dim", dim)
    if len(text) > _LONGEST:
        raise ParameterError(
            f"`expression` must have at most {_LONGEST} characters; got {len(text)}."
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        values = _evaluate(tree, _PLACES.unsqueeze(1).expand(-1, dim))
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(
            f"`expression` must be a formula such as 2*x**2; got {shown(text)}."
        ) from error
    if not bool(values.isfinite().any()):
        raise ParameterError(
            f"`expression` must be finite somewhere; got {shown(text)}, which is "
            "not. Look for a division by zero, or the root of a negative number."
        )
    # Constants take the shape of the positions.
    return lambda positions: 0 * positions[..., 0] + _evaluate(tree, positions)


def _evaluate(node: ast.AST, positions: Tensor) -> Tensor:
    """Evaluate a syntax tree; numbers become tensors, whose powers cannot grow."""
    match node:
        case ast.Constant(value=int() | float() as value) if (
            not isinstance(value, bool) and abs(value) <= _LARGEST
        ):
            return torch.tensor(float(value), dtype=positions.dtype)
        case ast.Name(id=name):
            return _variable(name, positions)
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            left = _evaluate(node.left, positions)
            right = _evaluate(node.right, positions)
            return torch.as_tensor(_OPERATORS[type(op)](left, right))
        case ast.UnaryOp(op=op) if type(op) in _OPERATORS:
            operand = _evaluate(node.operand, positions)
            return torch.as_tensor(_OPERATORS[type(op)](operand))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
            name in _FUNCTIONS
        ):
            return _FUNCTIONS[name](_evaluate(argument, positions))
    raise ParameterError(
        "`expression` may only use numbers, coordinates, + - * / ** and "
        f"{', '.join(_FUNCTIONS)}; got {shown(ast.unparse(node))}."
    )


def _variable(name: str, positions: Tensor) -> Tensor:
    dim = positions.shape[-1]
    names = [*_COORDINATES[:dim], "r", *_CONSTANTS]
    if name not in names:
        raise ParameterError(
            f"`expression` has no variable {name!r} in {dim} dimensions. Known: "
            f"{', '.join(names)}."
        )
    if name in _CONSTANTS:
        return torch.tensor(_CONSTANTS[name], dtype=positions.dtype)
    if name == "r":
        return positions.square().sum(dim=-1).sqrt()
    return positions[..., _COORDINATES.index(name)]
