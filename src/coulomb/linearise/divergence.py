"""The divergence of rows and its gradient, written out for `softmaxfeat`.

With `R_ij = f(q_i) . g(k_j)`, the weights `w_j` of the keys and `Z_i = sum_j w_j R_ij`,

`KL_i = sum_j p_ij log(p_ij / (w_j R_ij)) + log Z_i`, so that
`dKL_i / df(q_i) = -sum_j (p_ij / R_ij) g(k_j) + sum_j w_j g(k_j) / Z_i`,

and alike for keys. Both `f` and `g` are softmaxes: the correction of the first
vanishes, since no row depends on the scale of its query's features, and that of the
second is the gradient of `log w_j`. Autograd goes over the rows some ten times; this
goes over them four times, and keeps nothing.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coulomb.linearise.blockwise import key_weights
from coulomb.linearise.pairs import mean_key_row

if TYPE_CHECKING:
    from coulomb.linearise.objectives import Rows

__all__ = ["divergence_field"]

# Products of features below this count as this: what they are divided into, times
# features and summed, stays in the range.
_LEAST = 1e-30


def divergence_field(
    rows: "Rows", positions: Tensor, tilt: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Evaluate `KL(p_i || s_i)`, the mean over queries, and its gradient.

    The same as `RowDivergence` with `SoftmaxFeatures` and autograd.
    """
    q, k = (x.transpose(0, 1) for x in (rows.q, rows.k))  # (heads, batch, n, dim)
    for_queries, for_keys = (positions / temperature).chunk(2, dim=-1)
    phi_q, phi_k = _features(q, for_queries), _features(k, for_keys)
    mask = None if bool(rows.key_mask.all()) else rows.key_mask
    exponent, weight = (
        part.view(-1, k.shape[2], 1)
        for part in key_weights(k, tilt + mean_key_row(positions), mask)
    )
    share = rows.query_mask.to(q.dtype)
    share = share / share.sum().clamp_min(1)
    share = share.unsqueeze(-1).repeat(len(q), 1, 1)  # (heads * batch, n, 1)

    teacher = _teacher(q, k, mask, rows.bias)
    ratio = torch.bmm(phi_q, phi_k.transpose(1, 2)).clamp_(min=_LEAST)
    torch.div(teacher, ratio, out=ratio)
    sums = torch.bmm(weight.transpose(1, 2), phi_k)  # (heads * batch, 1, features)
    total = _times(phi_q, sums).clamp_(min=_LEAST)
    value = total.log().sub_(_times(teacher, exponent.transpose(1, 2)))
    logarithms = ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log_()
    value += logarithms.mul_(teacher).sum(dim=-1, keepdim=True)
    value = (value * share).view(len(q), -1).sum(dim=-1)

    grad_q = torch.baddbmm(sums / total, ratio, phi_k, alpha=-1).mul_(phi_q)
    grad_q.mul_(share)
    shared = phi_q.mul_(share)
    pull = torch.bmm((1 / total).transpose(1, 2), shared)
    grad_k = torch.bmm(ratio.transpose(1, 2), shared)
    grad_k = torch.addcmul(grad_k.neg_(), weight, pull).mul_(phi_k)
    grad_exponent = grad_k.sum(dim=-1, keepdim=True)
    grad_k.addcmul_(phi_k, grad_exponent, value=-1)

    gradient = torch.cat([_pull(q, grad_q), _pull(k, grad_k)], dim=-1) / temperature
    half = gradient.shape[-1] // 2
    moved = _flat(grad_exponent, k).transpose(1, 2) @ _flat(k, k)  # (heads, 1, dim)
    gradient[..., half:-1] += moved / gradient.shape[-2]
    return value, gradient


def _times(x: Tensor, row: Tensor) -> Tensor:
    # `x row'` as a row times a matrix, which libraries are faster at.
    return torch.bmm(row, x.transpose(1, 2)).transpose(1, 2)


def _flat(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(len(like), -1, x.shape[-1])


def _features(x: Tensor, particles: Tensor) -> Tensor:
    dim = x.shape[-1]
    columns = particles[..., :dim].transpose(1, 2)
    logits = torch.baddbmm(particles[..., dim].unsqueeze(1), _flat(x, x), columns)
    features = torch.softmax(logits, dim=-1, out=logits)
    return features.view(-1, x.shape[2], particles.shape[1])


def _pull(x: Tensor, grad: Tensor) -> Tensor:
    grad, x = _flat(grad, x), _flat(x, x)
    rows = torch.bmm(grad.transpose(1, 2), x)
    return torch.cat([rows, grad.sum(dim=1).unsqueeze(-1)], dim=-1)


def _teacher(q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = (q * q.shape[-1] ** -0.5).flatten(0, 1)
    scores = torch.bmm(scaled, k.flatten(0, 1).transpose(1, 2))
    by_head = scores.view(*q.shape[:3], -1)
    if bias is not None:
        by_head += bias.transpose(0, 1)
    if mask is not None:
        by_head.masked_fill_(~mask[:, None, :], torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, out=scores)
