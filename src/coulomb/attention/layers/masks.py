"""Reading the masks of `torch.nn.MultiheadAttention`."""

import torch
from torch import Tensor

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.attention.ops.traceable import must_be_plain


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check the number of axes, and say whether there is one for a batch."""
    dims = query.dim(), key.dim(), value.dim()
    if dims not in ((2, 2, 2), (3, 3, 3)):
        raise ParameterError(
            "`query`, `key` and `value` must all have three axes, or two without a "
            f"batch; got {dims[0]}, {dims[1]} and {dims[2]}."
        )
    return dims[0] == 3


def real_keys(
    key_padding_mask: Tensor | None, key: Tensor, *, batched: bool
) -> Tensor | None:
    """Turn torch's padding mask into ours, True = real token.

    Examples
    --------
    >>> real_keys(torch.tensor([False, True]), torch.zeros(1, 2, 3), batched=False)
    tensor([[ True, False]])
    """
    if key_padding_mask is None:
        return None
    shape = tuple(key.shape[:2] if batched else key.shape[1:2])
    if tuple(key_padding_mask.shape) != shape:
        raise ParameterError(
            f"`key_padding_mask` must have shape {shape}; got "
            f"{tuple(key_padding_mask.shape)}."
        )
    mask = key_padding_mask if batched else key_padding_mask.unsqueeze(0)
    return ~_blocked("key_padding_mask", mask)


def _blocked(name: str, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ParameterTypeError(
            f"`{name}` must be boolean (True = not seen) or floating-point (-inf = not "
            f"seen); got {mask.dtype}."
        )
    blocked = mask <= torch.finfo(mask.dtype).min
    if not must_be_plain(mask) and bool(mask.masked_fill(blocked, 0).any()):
        raise ParameterError(
            f"`{name}` must hold nothing but 0 and -inf; got other numbers, and a bias "
            "of the attention cannot be added without its matrix."
        )
    return blocked


def causal_from_mask(attn_mask: Tensor | None, n: int, m: int) -> bool:
    """Say whether a mask is the causal one; refuse every other that hides something.

    Examples
    --------
    >>> causal_from_mask(torch.ones(3, 3, dtype=torch.bool).triu(1), 3, 3)
    True
    """
    if attn_mask is None:
        return False
    if must_be_plain(attn_mask):
        raise ParameterError(
            "`attn_mask` cannot be read while a model is compiled, exported or mapped; "
            "pass is_causal=True, or construct the layer with causal=True."
        )
    if attn_mask.dim() not in (2, 3) or tuple(attn_mask.shape[-2:]) != (n, m):
        raise ParameterError(
            f"`attn_mask` must have shape ({n}, {m}), queries and keys, or "
            f"(batch * heads, {n}, {m}); got {tuple(attn_mask.shape)}."
        )
    blocked = _blocked("attn_mask", attn_mask)
    if not bool(blocked.any()):
        return False
    future = torch.ones(n, m, dtype=torch.bool, device=blocked.device).triu(1)
    if n == m and torch.equal(blocked, future.expand_as(blocked)):
        return True
    raise ParameterError(
        f"`attn_mask` must be None or the causal mask; got another of shape "
        f"{tuple(attn_mask.shape)}, which linear attention cannot express. Hide keys "
        "from all queries with `key_padding_mask`."
    )
