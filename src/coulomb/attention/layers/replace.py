"""Swapping the attention of a model that exists, with its weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coulomb._support.checks import check_member
from coulomb._support.errors import ParameterError
from coulomb.attention.layers.base import Seed, as_generator, options_of
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.attention.ops.checks import must_be_traceable

__all__ = ["TransformersAttention", "replace_attention"]

_SETTINGS = ("causal", "dropout", "feature_map", "n_features", "qkv", "start")

# Self-attention of transformers that is softmax(q k') v and nothing else (no relative
# or rotary positions, no blocks), with the names of its projections. BERT projects the
# output in the module that follows.
_BERT = ("query", "key", "value", "")
_TRANSFORMERS = {
    "BertGenerationSelfAttention": _BERT,
    "BertSelfAttention": _BERT,
    "CamembertSelfAttention": _BERT,
    "Data2VecTextSelfAttention": _BERT,
    "DistilBertSelfAttention": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "ElectraSelfAttention": _BERT,
    "ErnieSelfAttention": _BERT,
    "RobertaPreLayerNormSelfAttention": _BERT,
    "RobertaSelfAttention": _BERT,
    "ViTAttention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "XLMRobertaSelfAttention": _BERT,
}


def replace_attention(
    model: nn.Module,
    *,
    select: Callable[[str], bool] | None = None,
    generator: Seed = None,
    **settings: Any,
) -> list[str]:
    """Swap every attention layer of a model for `KernelAttention`, in place.

    Swapped are `torch.nn.MultiheadAttention` and the self-attention of BERT and its kin
    in transformers 5. Weights of the projections are carried over, in torch's layers as
    the very same parameters, so that optimisers keep working; particles are drawn.

    Parameters
    ----------
    model
        Any torch model.
    select
        Receives a layer's name and says whether to swap it; None swaps all.
    generator
        A generator on the CPU or a seed for the particles; None draws from torch's own.
    **settings
        `feature_map`, `n_features`, `qkv`, `start`, `causal` and `dropout` of
        `KernelAttention`; dropout is otherwise that of the layer.

    Returns
    -------
    list of str
        Names of the layers that were swapped.

    Examples
    --------
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> replace_attention(model, feature_map="favor", generator=0)
    ['self_attn']
    >>> model.self_attn
    KernelAttention(
      8, num_heads=2, dropout=0.1, feature_map=Favor(), n_features=256
      ...
    """
    for name in settings:
        check_member("settings", name, _SETTINGS)
    found = {name: m for name, m in model.named_modules() if _is_attention(m)}
    if "" in found:
        raise ParameterError(
            "`model` must contain attention layers; got one itself. Build a "
            "KernelAttention and give it `load_state_dict(..., strict=False)`."
        )
    chosen = [name for name in found if select is None or select(name)]
    if not chosen:
        raise ParameterError(
            "`model` must contain torch.nn.MultiheadAttention or the self-attention of "
            f"{', '.join(n.split('SelfA')[0] for n in _TRANSFORMERS)}; got "
            f"{type(model).__name__} with {len(found)} of them, none selected."
        )
    options = {"generator": as_generator(generator), **settings}
    # Everything is built before anything is swapped: a refusal changes nothing.
    swap_layers(model, {name: _swapped(found[name], options) for name in chosen})
    return chosen


def swap_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Put layers in the places of a model that they are named by."""
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it was decided for another layer


def _is_attention(module: nn.Module) -> bool:
    kind = type(module)
    theirs = kind.__module__.startswith("transformers.")
    return kind is nn.MultiheadAttention or (theirs and kind.__name__ in _TRANSFORMERS)


def _swapped(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    torchs = isinstance(module, nn.MultiheadAttention)
    layer = (_from_torch if torchs else _from_transformers)(module, options)
    return layer.train(module.training)


def _from_torch(module: Any, options: dict[str, Any]) -> nn.Module:
    if module.bias_k is not None or module.add_zero_attn:
        raise ParameterError(
            "`model` must have no MultiheadAttention with add_bias_kv or "
            "add_zero_attn; got one. Leave it out with `select`."
        )
    options = {**options_of(module), **options}
    layer = KernelAttention(module.embed_dim, module.num_heads, **options)
    if layer.qkv == "learned":
        layer.adopt(module)
        return layer
    layer.out_proj = module.out_proj
    weight, bias = module.in_proj_weight, module.in_proj_bias
    value = module.v_proj_weight if weight is None else weight.chunk(3)[2]
    _copy(layer.v_proj_weight, value)
    _copy(layer.v_proj_bias, None if bias is None else bias.chunk(3)[2])
    return layer


def _copy(target: Tensor | None, source: Tensor | None) -> None:
    if target is not None and source is not None:
        with torch.no_grad():
            target.copy_(source)
        target.requires_grad_(source.requires_grad)


def _from_transformers(module: Any, options: dict[str, Any]) -> nn.Module:
    *names, output = _TRANSFORMERS[type(module).__name__]
    query, key, value = (getattr(module, name) for name in names)
    kind = getattr(module, "position_embedding_type", "absolute")
    if query.in_features != query.out_features or kind != "absolute":
        raise ParameterError(
            "`model` must have square projections and absolute positions; got "
            f"{query.in_features} by {query.out_features} and {kind!r} in a "
            f"{type(module).__name__}. Leave it out with `select`."
        )
    dropout = getattr(module, "dropout", None)
    theirs = {
        "dropout": getattr(dropout, "p", getattr(module, "attention_dropout", 0.0)),
        "causal": bool(getattr(module, "is_causal", False)),
        "bias": query.bias is not None,
        "batch_first": True,
        "device": query.weight.device,
        "dtype": query.weight.dtype,
    }
    heads = getattr(module, "num_attention_heads", None) or module.n_heads
    layer = KernelAttention(query.in_features, heads, **{**theirs, **options})
    layer.out_proj = module.get_submodule(output) if output else nn.Identity()
    for name in ("weight", "bias"):
        parts = [getattr(part, name) for part in (query, key, value)]
        if layer.qkv == "shared":
            _copy(getattr(layer, f"v_proj_{name}"), parts[2])
        elif parts[0] is not None:
            _copy(getattr(layer, f"in_proj_{name}"), torch.cat(parts))
    return TransformersAttention(layer)


class TransformersAttention(nn.Module):
    """`KernelAttention` behind the call signature of transformers.

    Examples
    --------
    >>> layer = TransformersAttention(KernelAttention(8, 2, batch_first=True))
    >>> real = torch.tensor([[[[True, True, False]]]])
    >>> layer(torch.ones(1, 3, 8), attention_mask=real)[0].shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, attention: KernelAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend."""
        options = {"past_key_values": past_key_values, **options}
        for name in ("past_key_values", "head_mask", "past_key_value"):
            given = options.get(name)
            if given is not None:
                raise ParameterError(
                    f"`{name}` must be None for linear attention; got "
                    f"{type(given).__name__}. Call the model with use_cache=False."
                )
        padding = _padding(attention_mask, causal=self.attention.causal)
        out, weights = self.attention(
            hidden_states,
            hidden_states,
            hidden_states,
            key_padding_mask=padding,
            need_weights=bool(options.get("output_attentions")),
            average_attn_weights=False,
        )
        return out, weights


def _padding(mask: Tensor | None, *, causal: bool) -> Tensor | None:
    if mask is None:
        return None
    real = real_tokens(mask)
    repeated = mask.dim() == 2 or mask.stride(2) == 0 or mask.shape[2] == 1
    if not repeated and not must_be_traceable(mask):
        seen = _seen(mask)
        rows = torch.ones_like(seen[0, 0])
        expected = real[:, None, None] & (rows.tril() if causal else rows)
        if not torch.equal(seen, expected.expand_as(seen)):
            raise ParameterError(
                "`attention_mask` must hide the same tokens from all queries, or the "
                f"future; got another of shape {tuple(mask.shape)}, which linear "
                "attention cannot express."
            )
    return ~real


def _seen(mask: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min / 4
    return mask.bool()


def real_tokens(mask: Tensor) -> Tensor:
    """Read the padding out of a mask of transformers.

    Examples
    --------
    >>> real_tokens(torch.tensor([[[[0.0, -3e38]]]]))
    tensor([[ True, False]])
    """
    if mask.dim() == 2:
        return mask.bool()
    return _seen(mask[:, 0, -1])  # the last query sees every token
