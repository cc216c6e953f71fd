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

from coulomb._support.errors import ParameterError
from coulomb.theory.system import Function

_LONGEST = 1000
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
_CONSTANTS = {"pi": math.pi, "e": math.e}
_COORDINATES = {"x": 0, "y": 1, "z": 2}


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
    if len(text) > _LONGEST:
        raise ParameterError(
            f"`expression` must have at most {_LONGEST} characters; got {len(text)}."
        )
    try:
        value = _build(ast.parse(text.strip(), mode="eval").body, dim)
    except (SyntaxError, RecursionError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(
            f"`expression` must be a formula such as 2*x**2; got {text!r}."
        ) from error
    # Constants take the shape of the positions.
    return lambda positions: 0 * positions[..., 0] + value(positions)


def _build(node: ast.AST, dim: int) -> Function:
    """Turn a syntax tree into a function, refusing what is not arithmetic."""
    if isinstance(node, ast.Constant) and _is_number(node.value):
        # Numbers become tensors: powers of Python integers could grow for ever.
        return _constant(float(node.value))  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return _variable(node.id, dim)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        combine = _OPERATORS[type(node.op)]
        left, right = _build(node.left, dim), _build(node.right, dim)
        return lambda w: torch.as_tensor(combine(left(w), right(w)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        apply, operand = _OPERATORS[type(node.op)], _build(node.operand, dim)
        return lambda w: torch.as_tensor(apply(operand(w)))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and len(node.args) == 1
        and not node.keywords
    ):
        function, argument = _FUNCTIONS[node.func.id], _build(node.args[0], dim)
        return lambda w: function(argument(w))
    raise ParameterError(
        "`expression` may only use numbers, coordinates, + - * / ** and "
        f"{', '.join(_FUNCTIONS)}; got {ast.unparse(node)!r}."
    )


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= 1e100  # larger ones overflow


def _constant(value: float) -> Function:
    return lambda w: torch.tensor(value, dtype=w.dtype)


def _variable(name: str, dim: int) -> Function:
    names = [*list(_COORDINATES)[:dim], "r", *_CONSTANTS]
    if name not in names:
        raise ParameterError(
            f"`expression` has no variable {name!r} in {dim} dimensions. Known: "
            f"{', '.join(names)}."
        )
    if name in _CONSTANTS:
        return _constant(_CONSTANTS[name])
    if name == "r":
        return lambda w: w.square().sum(dim=-1).sqrt()
    return lambda w: w[..., _COORDINATES[name]]
