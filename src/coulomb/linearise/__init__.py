"""Linear attention for pretrained encoders, learned without labels."""

from coulomb.linearise.api import linearise, linearised_heads
from coulomb.linearise.kernels import KernelTable, kernel_table
from coulomb.linearise.layers import LinearisedAttention, LinearisedHeads
from coulomb.linearise.pretrained import load_pretrained, register
from coulomb.linearise.report import LineariseReport
from coulomb.linearise.settings import LineariseSettings

__all__ = [
    "KernelTable",
    "LineariseReport",
    "LineariseSettings",
    "LinearisedAttention",
    "LinearisedHeads",
    "kernel_table",
    "linearise",
    "linearised_heads",
    "load_pretrained",
    "register",
]
