"""Optimisers of Phase B, and a vocabulary trimmed to the tokens that occur."""

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from coulomb._support.errors import ParameterError
from coulomb.attention.encoder.encoder import KernelEncoder

__all__ = ["make_optimiser", "restore_vocabulary", "trim_vocabulary"]

_FUSED = ("cpu", "cuda")  # devices on which torch's Adam can be one pass
_TABLE = "token_embedding.weight"


def make_optimiser(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> torch.optim.Optimizer:
    """Make torch's Adam or AdamW, in one pass over the parameters where it can be.

    Examples
    --------
    >>> type(make_optimiser([nn.Parameter(torch.ones(2))], lr=1e-3)).__name__
    'Adam'
    """
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    chosen = [parameter for parameter in parameters if parameter.requires_grad]
    if not chosen:
        raise ParameterError(
            "`parameters` must hold one that requires a gradient; got none. Unfreeze "
            "what is to be trained."
        )
    fused = all(x.device.type in _FUSED and x.is_floating_point() for x in chosen)
    return kind(chosen, lr=lr, weight_decay=weight_decay, fused=fused)


def trim_vocabulary(
    model: KernelEncoder, token_ids: Tensor
) -> tuple[KernelEncoder, Tensor]:
    """Copy an encoder, with embeddings only of the tokens that occur.

    A row that no batch contains has no gradient, so Adam never moves it: training the
    copy and `restore_vocabulary` give what training the whole would, at a smaller cost
    for each step. That is not so where weight decay acts on the embeddings, which
    shrinks every row; leave them out of it, in Adam and in AdamW.

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> trimmed, kept = trim_vocabulary(model, torch.tensor([7, 5, 7]))
    >>> kept, trimmed.settings.vocab_size
    (tensor([5, 7]), 2)
    """
    kept = torch.unique(token_ids)
    size, full = model.settings.vocab_size, model.token_embedding
    if not len(kept) or int(kept[0]) < 0 or int(kept[-1]) >= size:
        raise ParameterError(
            f"`token_ids` must hold at least one id, all from 0 to {size - 1}; got "
            f"{len(kept)} different ones."
        )
    model.token_embedding = nn.Embedding(1, 1)  # so that the table is not copied
    try:
        trimmed = copy.deepcopy(model)
    finally:
        model.token_embedding = full
    weight = full.weight.detach()[kept.to(full.weight.device)]
    trimmed.token_embedding = nn.Embedding(len(kept), weight.shape[1], _weight=weight)
    trimmed.token_embedding.weight.requires_grad_(full.weight.requires_grad)
    trimmed.settings = replace(model.settings, vocab_size=len(kept))
    return trimmed, kept


def restore_vocabulary(
    trimmed: KernelEncoder, model: KernelEncoder, kept: Tensor
) -> None:
    """Write what a trimmed copy learned into the whole encoder.

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> trimmed, kept = trim_vocabulary(model, torch.tensor([7, 5]))
    >>> _ = trimmed.token_embedding.weight.data.fill_(3.0)
    >>> restore_vocabulary(trimmed, model, kept)
    >>> model.token_embedding.weight[7, 0].item()
    3.0
    """
    state = trimmed.state_dict()
    whole = model.token_embedding.weight.detach().clone()
    whole[kept.to(whole.device)] = state[_TABLE].to(whole)
    model.load_state_dict({**state, _TABLE: whole})
