"""Label vectors, whose products say which samples belong together."""

import math

import torch
from torch import Tensor

from coulomb._support.errors import ParameterError

LABEL_KINDS = (
    "signs",
    "centred-signs",
    "one-hot",
    "centred",
    "balanced",
    "regression",
)


def label_matrix(
    y: Tensor,
    *,
    kind: str,
    n_classes: int = 2,
    weights: Tensor | None = None,
) -> Tensor:
    """Turn labels into the vectors `Y_i` whose products say who belongs together.

    Parameters
    ----------
    y
        Class numbers from 0, or real targets, shape `(n,)` or `(n, outputs)`.
    kind
        "signs" (y = -1, +1, the paper's binary labels), "centred-signs" (the same,
        centred and scaled to unit variance), "one-hot" (the paper's multi-class),
        "centred" (one-hot minus the class frequencies), "balanced" (centred one-hot,
        every class weighing the same) or "regression" (centred, unit variance).
    n_classes
        How many classes there are.
    weights
        Probability weights of the samples; None for equal ones.

    Returns
    -------
    Tensor
        Shape `(n, n_labels)`.

    Examples
    --------
    >>> label_matrix(torch.tensor([0, 1, 1, 1]), kind="centred-signs").ravel()
    tensor([-1.7321,  0.5774,  0.5774,  0.5774], dtype=torch.float64)
    """
    if kind not in LABEL_KINDS:
        known = ", ".join(LABEL_KINDS)
        raise ParameterError(f"`kind` must be one of {known}; got {kind!r}.")
    n = y.shape[0]
    if weights is None:
        weights = torch.full((n,), 1 / n, dtype=torch.float64)
    weights = weights.double()
    if kind == "signs":
        return (2.0 * y.double() - 1).unsqueeze(-1)
    if kind == "centred-signs":
        return _standardised((2.0 * y.double() - 1).unsqueeze(-1), weights)
    if kind == "regression":
        values = y.double().reshape(n, -1)
        return _standardised(values, weights) / math.sqrt(values.shape[1])
    one_hot = torch.nn.functional.one_hot(y.long(), n_classes).double()
    if kind == "one-hot":
        return one_hot
    share = _mean(one_hot, weights)
    if kind == "centred":
        return one_hot - share
    return (one_hot - share) / share.clamp_min(1e-300).sqrt()


def _standardised(values: Tensor, weights: Tensor) -> Tensor:
    centred = values - _mean(values, weights)
    deviation = _mean(centred.square(), weights).sqrt()
    return centred / torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Average rows in a fixed order: torch's products depend on its threads."""
    products = (weights * values.mT).contiguous()
    return torch.from_numpy(products.cpu().numpy().sum(axis=1)).to(values.device)
