"""Linear attention with learnable kernels."""

from coulomb.attention._interface import AbstractAttention, attention_layers
from coulomb.attention.align import AlignmentResult, align
from coulomb.attention.baselines import Linformer, Performer, SoftmaxAttention
from coulomb.attention.decoding import (
    AttentionState,
    decode_step,
    init_state,
    prefill,
)
from coulomb.attention.diagnosis import Diagnosis, diagnose
from coulomb.attention.encoder import EncoderSettings, KernelEncoder
from coulomb.attention.layers import KernelAttention
from coulomb.attention.ops import kernel_attention, linear_attention, packed_attention
from coulomb.attention.phase_a import PAPER, AlignmentSettings
from coulomb.attention.reference import attention_weights, kernel_weights
from coulomb.attention.replace import replace_attention
from coulomb.attention.warm_up import CrossEntropy

__all__ = [
    "PAPER",
    "AbstractAttention",
    "AlignmentResult",
    "AlignmentSettings",
    "AttentionState",
    "CrossEntropy",
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
