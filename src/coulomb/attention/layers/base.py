"""What every attention layer shares: torch's call, masks, projections and their start.

Parameters are drawn from a generator, never from hidden state.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import (
    Registry,
    check_count,
    check_member,
    check_memory,
    check_real,
    check_seed,
    make_generator,
)
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.attention.ops.checks import check_float, must_be_traceable

if TYPE_CHECKING:
    from coulomb.attention.encoder.layout import Layout
    from coulomb.attention.encoder.packed import Dropout, LayerDropout

Seed = torch.Generator | int | None


def as_generator(generator: Seed) -> torch.Generator:
    """Turn a seed into a generator; None is torch's own, as in every torch module.

    Examples
    --------
    >>> as_generator(0).initial_seed() == as_generator(0).initial_seed()
    True
    """
    if generator is None:
        return torch.default_generator
    if isinstance(generator, torch.Generator):
        return generator
    return make_generator(check_seed("generator", generator))


def draw_uniform(tensor: Tensor, bound: float, *, generator: torch.Generator) -> None:
    """Fill a parameter with numbers from `[-bound, bound]`.

    They are drawn in float32 on the CPU, so that a seed means the same numbers for
    every precision and device.
    """
    drawn = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        tensor.copy_(drawn.uniform_(-bound, bound, generator=generator))


def empty_linear(n_in: int, n_out: int, **options: Any) -> nn.Linear:
    """Make torch's linear layer without drawing it."""
    place = options.pop("device", None) or torch.get_default_device()
    return nn.Linear(n_in, n_out, device="meta", **options).to_empty(device=place)


def reset_linear(linear: nn.Linear, *, generator: torch.Generator) -> None:
    """Draw a linear layer as torch does, weights and biases within `1 / sqrt(n_in)`."""
    for parameter in linear.parameters():
        bound = 1 / math.sqrt(linear.in_features)
        draw_uniform(parameter, bound, generator=generator)


def make_linear(n_in: int, n_out: int, *, generator: torch.Generator) -> nn.Linear:
    """Make a linear layer and draw it."""
    linear = empty_linear(n_in, n_out)
    reset_linear(linear, generator=generator)
    return linear


def check_input(name: str, x: Tensor, width: int, dtype: torch.dtype) -> None:
    """Check that an input has a layer's width, and its precision without autocast."""
    check_float(name, x)
    if not x.dim() or x.shape[-1] != width:
        raise ParameterError(
            f"`{name}` must have {width} coordinates on its last axis, as the layer "
            f"was built for; got shape {tuple(x.shape)}."
        )
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ParameterTypeError(
            f"`{name}` must have the layer's dtype, {dtype}; got {x.dtype}. "
            "Convert it, or the layer with `.to(dtype)`."
        )


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check the number of axes, and say whether there is one for a batch."""
    dims = query.dim(), key.dim(), value.dim()
    if dims not in ((2, 2, 2), (3, 3, 3)):
        raise ParameterError(
            "`query`, `key` and `value` must all have three axes, or two without a "
            f"batch; got {dims[0]}, {dims[1]} and {dims[2]}."
        )
    return dims[0] == 3


def real_keys(key_padding_mask: Any, key: Tensor, *, batched: bool) -> Tensor | None:
    """Turn torch's padding mask into ours, True = real token.

    Examples
    --------
    >>> real_keys(torch.tensor([False, True]), torch.zeros(1, 2, 3), batched=False)
    tensor([[ True, False]])
    """
    if key_padding_mask is None:
        return None
    if not isinstance(key_padding_mask, Tensor):
        kind = type(key_padding_mask).__name__
        raise ParameterTypeError(f"`key_padding_mask` must be a tensor; got {kind}.")
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
    if not must_be_traceable(mask) and bool(mask.masked_fill(blocked, 0).any()):
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
    if must_be_traceable(attn_mask):
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


@contextmanager
def in_mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Switch the mode in the block, and every module back to its own after it."""
    others = [module for module in model.modules() if module.training != train]
    try:
        if others:
            model.train(train)
        yield
    finally:
        for module in others:
            module.training = not train


class LayerOptions(TypedDict, total=False):
    """The options every layer takes, as in `AbstractAttention`."""

    qkv: str
    dropout: float
    bias: bool
    kdim: int | None
    vdim: int | None
    batch_first: bool
    causal: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


def options_of(layer: nn.MultiheadAttention) -> LayerOptions:
    """Read the options that torch's layer was constructed with."""
    return {
        "dropout": layer.dropout,
        "bias": layer.in_proj_bias is not None,
        "kdim": layer.kdim,
        "vdim": layer.vdim,
        "batch_first": layer.batch_first,
        "device": layer.out_proj.weight.device,
        "dtype": layer.out_proj.weight.dtype,
    }


class PackedTokens(NamedTuple):
    """States of sequences that follow one another, and how to attend inside them."""

    states: Tensor  # (tokens, embed_dim)
    layout: "Layout"
    dropout: "LayerDropout"
    compiled: bool  # whether loops for float32 on the CPU may be used


class AbstractAttention(nn.Module, ABC):
    """A layer that is called like `torch.nn.MultiheadAttention`.

    Parameters and their names are those of torch's layer: `in_proj_weight`,
    `in_proj_bias`, `out_proj`, and `q_proj_weight`, `k_proj_weight`, `v_proj_weight`
    where keys or values have another width. With `qkv="shared"` there are only
    `v_proj_weight`, `v_proj_bias` and `out_proj`.

    Parameters
    ----------
    embed_dim, num_heads
        Width, and the number of heads it is split into.
    qkv
        `"learned"` projects queries, keys and values; `"shared"` only values, and the
        heads of queries and keys are slices of the input.
    causal
        Whether every call is causal, whatever its `is_causal`.
    dropout, bias, kdim, vdim, batch_first, device, dtype
        As in `torch.nn.MultiheadAttention`.
    """

    # torch's encoder layers bypass `forward` in evaluation if this is True.
    _qkv_same_embed_dim = False
    bias_k = None
    bias_v = None
    add_zero_attn = False

    # The function of `encoder.packed_compiled` that does what `attend` does, by name.
    compiled_core: ClassVar[str | None] = None

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    v_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        qkv: str = "learned",
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check_count("embed_dim", embed_dim)
        self.num_heads = check_count("num_heads", num_heads)
        self.dropout = check_real("dropout", dropout, at_least=0, at_most=1)
        self.kdim = check_count("kdim", embed_dim if kdim is None else kdim)
        self.vdim = check_count("vdim", embed_dim if vdim is None else vdim)
        self.batch_first = batch_first
        self.causal = causal
        self.qkv = qkv
        if embed_dim % num_heads:
            raise ParameterError(
                f"`embed_dim` must be divisible by `num_heads`; got {embed_dim} and "
                f"{num_heads}."
            )
        check_member("qkv", qkv, ("learned", "shared"))
        if qkv == "shared" and self.kdim != embed_dim:
            raise ParameterError(
                f"`kdim` must equal `embed_dim` with qkv='shared'; got {kdim} and "
                f"{embed_dim}. Use qkv='learned' for keys of another width."
            )
        check_memory("embed_dim", 16 * embed_dim * max(embed_dim, self.kdim, self.vdim))
        self.head_dim = embed_dim // num_heads
        same = qkv == "learned" and self.kdim == self.vdim == embed_dim
        separate = qkv == "learned" and not same
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if same else None,
            "in_proj_bias": (3 * embed_dim,) if bias and qkv == "learned" else None,
            "q_proj_weight": (embed_dim, embed_dim) if separate else None,
            "k_proj_weight": (embed_dim, self.kdim) if separate else None,
            "v_proj_weight": None if same else (embed_dim, self.vdim),
            "v_proj_bias": (embed_dim,) if bias and qkv == "shared" else None,
        }
        self.out_proj: nn.Module = empty_linear(
            embed_dim, embed_dim, bias=bias, device=device, dtype=dtype
        )
        for name, shape in shapes.items():
            parameter = None if shape is None else nn.Parameter(self.new_empty(*shape))
            self.register_parameter(name, parameter)

    def adopt(self, layer: nn.MultiheadAttention) -> None:
        """Take over the parameters of torch's layer: the very same, not copies.

        Parameters
        ----------
        layer
            A layer of the same shape, with queries, keys and values projected.
        """
        self.out_proj = layer.out_proj
        for name, parameter in layer.named_parameters(recurse=False):
            setattr(self, name, parameter)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the projections."""
        joint = self.in_proj_weight
        weight = self.v_proj_weight if joint is None else joint
        assert weight is not None
        return weight.dtype

    def new_empty(self, *shape: int) -> Tensor:
        """Make a tensor on the layer's device, in its precision.

        Parameters
        ----------
        *shape
            Its shape.

        Returns
        -------
        Tensor
            Not filled.
        """
        return next(self.out_proj.parameters()).new_empty(shape)

    def reset_parameters(self, *, generator: Seed = None) -> None:
        """Draw every parameter anew, the projections as torch does.

        Parameters
        ----------
        generator
            A generator on the CPU or a seed; None draws from torch's own.
        """
        source = as_generator(generator)
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_proj_weight"):
                bound = math.sqrt(6 / sum(parameter.shape))
                draw_uniform(parameter, bound, generator=source)
            elif name.endswith("_proj_bias"):
                nn.init.zeros_(parameter)
        if isinstance(self.out_proj, nn.Linear):
            reset_linear(self.out_proj, generator=source)
            if self.out_proj.bias is not None:
                nn.init.zeros_(self.out_proj.bias)

    def project(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project inputs and split them into heads.

        Parameters
        ----------
        query, key, value
            Shapes `(batch, n, embed_dim)`, `(batch, m, kdim)`, `(batch, m, vdim)`.

        Returns
        -------
        tuple
            Queries, keys and values, `(batch, heads, length, head_dim)`.
        """
        linear, joint, bias = functional.linear, self.in_proj_weight, self.in_proj_bias
        parts: Sequence[Tensor]
        if self.qkv == "shared":
            assert self.v_proj_weight is not None
            parts = query, key, linear(value, self.v_proj_weight, self.v_proj_bias)
        elif joint is not None and query is key and key is value:
            parts = linear(query, joint, bias).chunk(3, dim=-1)
        else:
            separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            weights: Sequence[Any] = separate if joint is None else joint.chunk(3)
            biases = [None] * 3 if bias is None else bias.chunk(3)
            parts = list(map(linear, (query, key, value), weights, biases))
        q, k, v = (
            x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x in parts
        )
        return q, k, v

    def join(self, heads: Tensor) -> Tensor:
        """Put heads side by side and apply the output projection.

        Parameters
        ----------
        heads
            Shape `(batch, heads, n, head_dim)`.

        Returns
        -------
        Tensor
            Shape `(batch, n, embed_dim)`.
        """
        joined: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return joined

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Attend in every head.

        Parameters
        ----------
        q, k, v
            Shapes `(batch, heads, n, head_dim)` and `(batch, heads, m, head_dim)`.
        key_mask
            Shape `(batch, m)`, True = real token; None if all are.
        causal
            Whether query i sees the keys j <= i only.

        Returns
        -------
        Tensor
            Shape `(batch, heads, n, head_dim)`.
        """

    @abstractmethod
    def weights(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Write out the matrix that `attend` multiplies the values with.

        Parameters
        ----------
        q, k, key_mask, causal
            As in `attend`.

        Returns
        -------
        Tensor
            Shape `(batch, heads, n, m)`.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Packed forms are inherited together with the methods they stand for: what a
        # class defines anew is what runs on packed tokens, too.
        for name in ("attend_packed", "attend_dropped", "compiled_core"):
            owner = next(kind for kind in cls.__mro__ if name in vars(kind))
            methods = ((cls.attend, "attend"), (cls.project, "project"))
            if any(getattr(owner, known, now) is not now for now, known in methods):
                setattr(cls, name, vars(AbstractAttention)[name])

    def attend_packed(self, tokens: PackedTokens) -> Tensor:
        """Attend inside each of several sequences that follow one another.

        Parameters
        ----------
        tokens
            The states, and where sequences are.

        Returns
        -------
        Tensor
            What the heads give, side by side, `(tokens, embed_dim)`.
        """
        states, layout, dropout, _ = tokens
        dropped = dropout.at(self.dropout)
        out = self.attend_compiled(tokens) if dropped is None else None
        if out is not None:
            return out
        padded, key_mask = layout.pad(torch.stack(self.project_packed(states), dim=1))
        q, k, v = padded.permute(2, 0, 3, 1, 4)  # (batch, heads, longest, head_dim)
        if dropped is not None:
            out = self.attend_dropped(q, k, v, key_mask, dropped)
        else:
            with in_mode(self, train=dropout.seed is not None):
                out = self.attend(q, k, v, key_mask, causal=self.causal)
        return layout.unpad(out.transpose(1, 2)).flatten(1)

    def attend_dropped(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, dropout: "Dropout"
    ) -> Tensor:
        """Attend with dropout: here with torch's, which draws by its own generator.

        Parameters
        ----------
        q, k, v, key_mask
            As in `attend`.
        dropout
            What is dropped.

        Returns
        -------
        Tensor
            As that of `attend`.
        """
        with in_mode(self, train=True):
            return self.attend(q, k, v, key_mask, causal=self.causal)

    def attend_compiled(self, tokens: PackedTokens) -> Tensor | None:
        """Attend in the compiled loops that the class names, without dropout.

        Parameters
        ----------
        tokens
            The states, and where sequences are.

        Returns
        -------
        Tensor or None
            As that of `attend_packed`; None where there are no such loops.
        """
        if not tokens.compiled or self.compiled_core is None:
            return None
        # Only here: it imports numba.
        from coulomb.attention.encoder import packed_compiled

        core = getattr(packed_compiled, self.compiled_core)
        out: Tensor | None = core(self, tokens.states, tokens.layout)
        return out

    def project_packed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project packed states.

        Parameters
        ----------
        x
            Shape `(tokens, embed_dim)`.

        Returns
        -------
        tuple
            Queries, keys and values, `(tokens, heads, head_dim)`.
        """
        rows = x.unsqueeze(0)
        parts = self.project(rows, rows, rows)
        q, k, v = (part.squeeze(0).transpose(0, 1) for part in parts)
        return q, k, v

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the arguments of `torch.nn.MultiheadAttention.forward`.

        Parameters
        ----------
        query, key, value
            Shapes `(n, batch, dim)`, with `batch_first` `(batch, n, dim)`, or `(n,
            dim)`.
        key_padding_mask
            Shape `(batch, m)`, **True = padding**; or 0 for a token and -inf for
            padding.
        need_weights
            Whether to write out the attention matrix, at a cost of n times m. True is
            torch's default; say False wherever you do not look at it.
        attn_mask
            None or the causal mask: no other can be expressed without the matrix.
        average_attn_weights
            Whether the matrix is averaged over heads.
        is_causal
            Whether query i sees the keys j <= i only; `attn_mask` is then not read.

        Returns
        -------
        tuple
            The output, shaped like `query`; and None, or the matrix `(batch, n, m)`,
            `(batch, heads, n, m)` if not averaged, without the batch if there is none.
        """
        if isinstance(query, Tensor) and query.is_nested:
            return self._forward_nested(query, key, value, need_weights, is_causal)
        check_input("query", query, self.embed_dim, self.dtype)
        check_input("key", key, self.kdim, self.dtype)
        check_input("value", value, self.vdim, self.dtype)
        batched = check_inputs(query, key, value)
        same = query is key, key is value
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        # `project` takes one product for the three of them if they are one tensor.
        key = query if same[0] else key
        value = key if same[1] else value
        causal = self.causal or is_causal
        causal = causal or causal_from_mask(attn_mask, query.shape[1], key.shape[1])
        key_mask = real_keys(key_padding_mask, key, batched=batched)
        q, k, v = self.project(query, key, value)
        out = self.join(self.attend(q, k, v, key_mask, causal=causal))
        weights = None
        if need_weights:
            weights = self.weights(q, k, key_mask, causal=causal)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, weights: bool, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        # torch's encoder packs padded batches like this in evaluation, if it was built
        # around another attention layer.
        if query is not key or key is not value or weights:
            raise ParameterError(
                "`query` must be the same nested tensor as `key` and `value`, with "
                "need_weights=False; pad it with `to_padded_tensor` instead."
            )
        lengths = [part.shape[0] for part in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        steps = torch.arange(padded.shape[1], device=padded.device)
        key_mask = steps < torch.tensor(lengths, device=padded.device).unsqueeze(1)
        q, k, v = self.project(padded, padded, padded)
        heads = self.attend(q, k, v, key_mask, causal=self.causal or causal)
        rows = zip(self.join(heads), lengths, strict=True)
        return torch.nested.as_nested_tensor([row[:n] for row, n in rows]), None

    def extra_repr(self) -> str:
        """Show the settings that differ from torch's."""
        shown = f"{self.embed_dim}, num_heads={self.num_heads}"
        for name, usual in (("qkv", "learned"), ("causal", False), ("dropout", 0.0)):
            if getattr(self, name) != usual:
                shown += f", {name}={getattr(self, name)!r}"
        return shown


attention_layers: Registry[AbstractAttention] = Registry("attention")
