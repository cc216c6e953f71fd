"""Linearised encoders as models of Hugging Face transformers.

Attention layers carry `LinearisedHeads`. Their particles are in the state dict and
their settings in the configuration, so that `save_pretrained`, `from_pretrained`,
pipelines and the Trainer work. transformers is imported when something here is called.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.archive import check_tokenizer, read_json, read_shapes
from coulomb._support.checks import retold
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.attention.layers.replace import (
    LAYERS,
    PROJECTIONS,
    as_saveable,
    config_class,
    real_tokens,
    register_configs,
)
from coulomb.attention.ops.checks import must_be_traceable
from coulomb.linearise.heads import LinearisedHeads, near_attention
from coulomb.linearise.teacher import FAMILIES, Stack

ATTENTION = "coulomb"
"""The name under which the attention function is registered with transformers."""

# Nothing is fetched, nothing is run, nothing is unpickled.
LOCAL = {"local_files_only": True, "trust_remote_code": False}
_SIZES = ("vocab_size", "hidden_size", "dim", "intermediate_size", "hidden_dim")
_TABLES = ("max_position_embeddings", "type_vocab_size", "num_labels")
_COUNTS = ("num_hidden_layers", "n_layers", "num_attention_heads", "n_heads")


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers from bars, and from reports, which hold words of the files."""
    told = transformers().utils.logging
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()


@contextmanager
def reading(folder: Path) -> Iterator[Any]:
    """Check the files of a saved model, and turn errors of its readers into one.

    Gives the configuration of the model.
    """
    if not (folder / "config.json").is_file():
        raise FileFormatError(
            f"{folder} is not a saved model: it has no config.json. Save one with "
            "save_pretrained."
        )
    for path in sorted(folder.glob("*.json")):
        check_tokenizer(read_json(path, finite=False), str(path))
    _check_sizes(folder)  # before labels that nobody has are named
    with retold(f"{folder} is not a model that transformers can load"), quietly():
        yield transformers().AutoConfig.from_pretrained(folder, **LOCAL)


def _check_sizes(folder: Path) -> None:
    config = read_json(folder / "config.json", finite=False)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= read_shapes(path)
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    most = dict.fromkeys((*_SIZES, *_TABLES), largest)
    most |= dict.fromkeys(_COUNTS, len(shapes))
    for name, limit in most.items():
        size = config.get(name, 1) if isinstance(config, dict) else None
        if not isinstance(size, int) or not 0 < size <= limit:
            raise FileFormatError(
                f"{folder}: `{name}` of config.json cannot be {size!r:.40} with the "
                f"weights there, {len(shapes)} tensors and no side above {largest}."
            )


def load_tokenizer(folder: Path, **options: Any) -> Any:
    """Load a tokenizer that cuts texts into tokens which its model has."""
    with reading(folder) as config:
        found = transformers().AutoTokenizer.from_pretrained(folder, **LOCAL, **options)
        if len(found) > config.vocab_size:
            raise FileFormatError(
                f"{folder}: {len(found)} tokens, but the model has {config.vocab_size}."
            )
        found("A text, to see that it can be cut.")
    return found


def load_weights(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a model whose weights are all there, finite, and as large as it says."""
    asked = {"use_safetensors": True, "ignore_mismatched_sizes": True}
    model, told = kind.from_pretrained(
        folder, output_loading_info=True, **asked, **LOCAL, **options
    )
    lost = [name for name in told["missing_keys"] if "pooler" not in name]
    lost += [str(name) for name in told["mismatched_keys"]]
    if lost:
        raise FileFormatError(
            f"{folder}: the weights lack, or have in another shape, {lost[0]!r}."
        )
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise FileFormatError(f"{folder}: {name!r} has values that are not finite.")
    return model


def transformers() -> ModuleType:
    """Import transformers, or say how to install it."""
    try:
        import transformers as module
        from transformers.masking_utils import AttentionMaskInterface  # noqa: F401
    except ImportError as error:
        raise ParameterError(
            "`model` of Hugging Face needs transformers with an attention interface; "
            "install it with: pip install 'coulomb[hf]'."
        ) from error
    return module


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    mask = None if attention_mask is None else real_tokens(attention_mask)
    packed = options.pop("packed", None)
    if packed is not None:
        heads = getattr(module, "coulomb", None)
        if heads is not None:
            rows = [x[0].transpose(0, 1) for x in (query, key, value)]
            ends = functional.pad(packed.sum(dim=1).cumsum(dim=0), (1, 0))
            out = heads.attend_packed(*rows, ends.tolist())
            if out is not None:
                return out.unsqueeze(0), None
        query, key, value = (_spread(x, packed) for x in (query, key, value))
        spread, _ = _attend(module, query, key, value, packed, dropout, **options)
        return spread[packed].unsqueeze(0), None
    window = getattr(module, "sliding_window", None)
    if window:  # transformers counts the token itself
        out = near_attention(query, key, value, mask, window - 1)
        return out.transpose(1, 2), None
    heads = getattr(module, "coulomb", None) or _fresh_heads(module, query)
    out = functional.dropout(heads(query, key, value, mask), dropout, module.training)
    shown = options.get("output_attentions")
    weights = heads.weights(query, key, mask) if shown else None
    return out.transpose(1, 2).contiguous(), weights


def _spread(x: Tensor, real: Tensor) -> Tensor:
    """Turn texts that were packed to one, `(1, heads, tokens, dim)`, into a batch."""
    wide = x.new_zeros(*real.shape, x.shape[1], x.shape[3])
    wide[real] = x[0].transpose(0, 1)
    return wide.transpose(1, 2)


def _fresh_heads(module: Any, query: Tensor) -> LinearisedHeads:
    """Draw heads for a model that is to be trained, when it first attends."""
    # The mark that transformers leaves on weights it has read; those drawn have none.
    read = any(hasattr(x, "_is_hf_initialized") for x in module.parameters())
    if read or type(module).__name__ not in PROJECTIONS:
        raise ParameterError(
            f"`attn_implementation` must not be {ATTENTION!r} for a model that was "
            f"trained with softmax, or is none of {FAMILIES}; got it for a "
            f"{type(module).__name__}. Call coulomb.linearise.linearise first."
        )
    if "coulomb" not in vars(module.config):
        # The model is saved and loaded as what it is now.
        vars(module.config)["coulomb"] = {}
        base: Any = type(module.config)
        module.config.__class__ = config_class(base)
    size = query.shape[1], query.shape[3]
    module.coulomb = LinearisedHeads(*size).draw().to(query.device)
    return module.coulomb


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    # One row of keys for all queries: a mask of length squared would cost what linear
    # attention saves. Without this function the padding would be dropped silently.
    from transformers.masking_utils import bidirectional_mask_function

    known = mask_function in (None, bidirectional_mask_function)
    # Whether the first token sees the next; a window is the layer's own to keep.
    if not known and not bool(mask_function(*torch.tensor([0, 0, 0, 1]))):
        raise ParameterError(
            "`model` must be an encoder whose tokens all see each other; got a causal "
            "mask."
        )
    if attention_mask is None or (
        not torch.compiler.is_compiling() and bool(attention_mask.all())
    ):
        return None
    return attention_mask[:, None, None, :kv_length].bool()


@cache
def _linearised_mpnet(base: Any) -> Any:
    """Make the subclass of MPNet's self-attention that has learned heads.

    MPNet adds a bias of the relative position to the scores, which no product of
    features of one token each can express. Learned heads are taught rows with the bias
    and have none themselves; exact heads keep it.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        split = (self.num_attention_heads, self.attention_head_size)
        q, k, v = (
            part(hidden_states).unflatten(-1, split).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mask = None if attention_mask is None else real_tokens(attention_mask)
        out = self.dropout(self.coulomb(q, k, v, mask, position_bias))
        joined = self.o(out.transpose(1, 2).flatten(2))
        if not output_attentions:
            return (joined,)
        return joined, self.coulomb.weights(q, k, mask)

    body = {"forward": forward, "__module__": __name__}
    return type("LinearisedMPNetSelfAttention", (base,), body)


def _no_position_bias(*_: object, **__: object) -> None:
    return None


@cache
def register_attention() -> None:
    """Teach transformers the attention function and the mask."""
    module = transformers()
    module.AttentionInterface.register(ATTENTION, _attend)
    module.AttentionMaskInterface.register(ATTENTION, _mask)


def register() -> None:
    """Teach transformers the attention function, the mask and the model classes.

    An import of `coulomb` does it, before transformers is imported or after.
    """
    register_attention()
    register_configs()


class Int8Linear(nn.Linear):
    """A linear layer that multiplies eight-bit integers where no gradient is needed.

    `y_i = s_i t_o (round(x_i / s_i) . round(w_o / t_o)) + b_o`, `s_i = max |x_i| / 127`
    of a token and `t_o` of a row of the weight, which is saved as it is.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; as `nn.Linear` where somebody traces or not on the CPU."""
        if torch.is_grad_enabled() or must_be_traceable(x) or not x.is_cpu:
            return super().forward(x)
        version = 0 if self.weight.is_inference() else self.weight._version
        found = (self.weight.data_ptr(), version)
        if vars(self).get("_seen") != found:
            weight, scale = _to_int8(self.weight.float())
            vars(self).update(_seen=found, _made=(weight.t().contiguous(), scale.t()))
        weight, scale = vars(self)["_made"]
        rows, own = _to_int8(x.reshape(-1, self.in_features).float())
        out = torch._int_mm(rows, weight).float().mul_(own).mul_(scale)
        out = out if self.bias is None else out.add_(self.bias)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round_().to(torch.int8), scale


def use_int8(stack: Stack) -> None:
    """Let the linear layers of an encoder's blocks multiply eight-bit integers."""
    for module in stack.blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Int8Linear
    config: Any = getattr(stack.model, "config", None)
    if hasattr(config, "coulomb"):
        config.coulomb["int8"] = True


def _attach(model: Any, settings: Mapping[str, Any]) -> None:
    """Give every attention layer its heads, with particles still to be filled."""
    options = dict(settings)
    stack = Stack(model)
    sites = stack.sites
    if options.pop("int8", False):
        use_int8(stack)
    exact = options.pop("exact_heads", [()] * len(sites))
    for site, heads in zip(sites, exact, strict=True):
        layer: Any = site.module
        if type(layer).__name__ == "MPNetSelfAttention":
            layer.__class__ = _linearised_mpnet(layer.__class__)
        dim = getattr(layer, "attention_head_size", None) or layer.head_dim
        size = site.num_heads, dim
        layer.coulomb = LinearisedHeads(*size, exact_heads=heads, **options)
    if not any(exact):
        for module in model.modules():
            if type(module).__name__ == "MPNetEncoder":
                vars(module)["compute_position_bias"] = _no_position_bias
    model.config._attn_implementation_internal = ATTENTION


def _attach_and_draw(model: Any, settings: Mapping[str, Any]) -> None:
    _attach(model, settings)
    for module in model.modules():
        if isinstance(module, LinearisedHeads):
            module.draw()


LAYERS["heads"] = _attach_and_draw


def with_linearised_heads(
    model: Any, *, exact_heads: Sequence[Sequence[int]], **options: Any
) -> Any:
    """Copy a model of transformers into its class with `LinearisedHeads`."""
    register()
    settings = options | {"exact_heads": [list(heads) for heads in exact_heads]}
    fast = copy.deepcopy(model)
    as_saveable(fast, settings)
    _attach(fast, settings)
    return fast.to(device=next(model.parameters()).device)


def load_pretrained(folder: str | Path, *, task: str = "AutoModel") -> Any:
    """Load a linearised model that `save_pretrained` wrote.

    Parameters
    ----------
    folder
        Where it is; safetensors only.
    task
        The class of transformers that chooses the model.

    Returns
    -------
    model
        In evaluation mode.
    """
    register()
    folder = Path(folder)
    with reading(folder) as config:
        if not str(config.model_type).startswith("coulomb-"):
            raise FileFormatError(
                f"{folder} is not a linearised model: its type is "
                f"{config.model_type!r}. Load it with transformers, and linearise it."
            )
        return load_weights(getattr(transformers(), task), folder, config=config)
