"""The projections around attention: their names, their start, their heads."""

import math
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError, unknown_name
from coulomb.attention.layers.parameter_init import (
    Seed,
    as_generator,
    draw_uniform,
    empty_linear,
    reset_linear,
)

QKV = ("learned", "shared")


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


class Projections(nn.Module):
    """The projections of an attention layer, under the names torch gives them.

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
        if qkv not in QKV:
            raise unknown_name("qkv", qkv, QKV)
        if qkv == "shared" and self.kdim != embed_dim:
            raise ParameterError(
                f"`kdim` must equal `embed_dim` with qkv='shared'; got {kdim} and "
                f"{embed_dim}. Use qkv='learned' for keys of another width."
            )
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
        place = torch.get_default_device() if device is None else device
        self.out_proj: nn.Module = empty_linear(
            embed_dim, embed_dim, bias=bias, device=place, dtype=dtype
        )
        for name, shape in shapes.items():
            parameter = None if shape is None else nn.Parameter(self.new_empty(*shape))
            self.register_parameter(name, parameter)

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
        linear = functional.linear
        parts: Sequence[Tensor]
        if self.qkv == "shared":
            assert self.v_proj_weight is not None
            parts = query, key, linear(value, self.v_proj_weight, self.v_proj_bias)
        elif self.in_proj_weight is not None and query is key and key is value:
            joint = linear(query, self.in_proj_weight, self.in_proj_bias)
            parts = joint.chunk(3, dim=-1)
        else:
            inputs = query, key, value
            parts = [linear(x, *wb) for x, wb in zip(inputs, self._maps(), strict=True)]
        q, k, v = (
            x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x in parts
        )
        return q, k, v

    def _maps(self) -> list[tuple[Tensor, Tensor | None]]:
        weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        separate = [weight for weight in weights if weight is not None]
        joint, bias = self.in_proj_weight, self.in_proj_bias
        matrices = separate if joint is None else joint.chunk(3)
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return list(zip(matrices, biases, strict=True))

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
