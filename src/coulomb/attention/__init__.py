"""Linear attention with learnable kernels."""

from coulomb.attention.decoding import (
    AttentionState,
    decode_step,
    init_state,
    prefill,
)
from coulomb.attention.ops import kernel_attention, linear_attention, packed_attention
from coulomb.attention.reference import attention_weights, kernel_weights

__all__ = [
    "AttentionState",
    "attention_weights",
    "decode_step",
    "init_state",
    "kernel_attention",
    "kernel_weights",
    "linear_attention",
    "packed_attention",
    "prefill",
]
