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
        tree = ast.parse(text.strip(), mode="eval").body
        _check(tree, dim)
    except (SyntaxError, RecursionError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(
            f"`expression` must be a formula such as 2*x**2; got {text!r}."
        ) from error

    def function(positions: Tensor) -> Tensor:
        value = _evaluate(tree, positions)
        zero = 0 * positions[..., 0]  # constants take the shape of the positions
        return zero + value

    return function


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= 1e100  # larger ones overflow


def _check(node: ast.AST, dim: int) -> None:
    if isinstance(node, ast.Constant) and _is_number(node.value):
        return
    if isinstance(node, ast.Name):
        names = [*list(_COORDINATES)[:dim], "r", *_CONSTANTS]
        if node.id not in names:
            raise ParameterError(
                f"`expression` has no variable {node.id!r} in {dim} dimensions. Known: "
                f"{', '.join(names)}."
            )
        return
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        _check(node.left, dim)
        _check(node.right, dim)
        return
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        _check(node.operand, dim)
        return
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and len(node.args) == 1
        and not node.keywords
    ):
        _check(node.args[0], dim)
        return
    raise ParameterError(
        "`expression` may only use numbers, coordinates, + - * / ** and "
        f"{', '.join(_FUNCTIONS)}; got {ast.unparse(node)!r}."
    )


def _evaluate(node: ast.AST, positions: Tensor) -> Tensor:
    # Numbers become tensors at once: powers of Python integers could grow for ever.
    if isinstance(node, ast.Constant):
        return torch.tensor(float(node.value), dtype=positions.dtype)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        if node.id in _CONSTANTS:
            return torch.tensor(_CONSTANTS[node.id], dtype=positions.dtype)
        if node.id == "r":
            return positions.square().sum(dim=-1).sqrt()
        return positions[..., _COORDINATES[node.id]]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, positions), _evaluate(node.right, positions)
        return torch.as_tensor(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp):
        return torch.as_tensor(
            _OPERATORS[type(node.op)](_evaluate(node.operand, positions))
        )
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return _FUNCTIONS[node.func.id](_evaluate(node.args[0], positions))
