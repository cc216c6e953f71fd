"""Linear attention for pretrained encoders, learned without labels."""

from coulomb.linearise.api import (
    KernelTable,
    LineariseReport,
    describe,
    kernel_table,
    linearise,
    linearised_heads,
)
from coulomb.linearise.fit import LineariseSettings
from coulomb.linearise.heads import LinearisedAttention, LinearisedHeads
from coulomb.linearise.huggingface import load_pretrained, register

__all__ = [
    "KernelTable",
    "LineariseReport",
    "LineariseSettings",
    "LinearisedAttention",
    "LinearisedHeads",
    "describe",
    "kernel_table",
    "linearise",
    "linearised_heads",
    "load_pretrained",
    "register",
]
