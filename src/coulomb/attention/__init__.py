"""Linear attention with learnable kernels."""

from coulomb.attention.align.diagnosis import Diagnosis, diagnose
from coulomb.attention.align.problem import PAPER, AlignmentSettings
from coulomb.attention.align.run import AlignmentResult, CrossEntropy, align
from coulomb.attention.encoder.encoder import EncoderSettings, KernelEncoder
from coulomb.attention.layers.base import AbstractAttention, attention_layers
from coulomb.attention.layers.baselines import Linformer, Performer, SoftmaxAttention
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.attention.layers.replace import replace_attention
from coulomb.attention.ops.api import (
    attention_weights,
    kernel_attention,
    kernel_weights,
    linear_attention,
    packed_attention,
)
from coulomb.attention.ops.decoding import (
    AttentionState,
    Decoder,
    decode_step,
    init_state,
    prefill,
)

__all__ = [
    "PAPER",
    "AbstractAttention",
    "AlignmentResult",
    "AlignmentSettings",
    "AttentionState",
    "CrossEntropy",
    "Decoder",
    "Diagnosis",
    "EncoderSettings",
    "KernelAttention",
    "KernelEncoder",
    "Linformer",
    "Performer",
    "SoftmaxAttention",
    "align",
    "attention_layers",
    "attention_weights",
    "decode_step",
    "diagnose",
    "init_state",
    "kernel_attention",
    "kernel_weights",
    "linear_attention",
    "packed_attention",
    "prefill",
    "replace_attention",
]
