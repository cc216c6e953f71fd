"""Dropout whose masks are a function of seed, place and element: no state, no draws.

Element i at a place is dropped if the upper 16 bits of a hash of key and i are below
`round(65536 p)`; the key is itself a hash of seed and place. A step that is repeated,
on another day or after an interruption, drops the same elements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B  # of the 32-bit mixer "lowbias32"
_LEVELS = 1 << 16

# Numbers of the places that drop: the embedding, and four in each layer.
EMBEDDING, PER_LAYER = 0, 4
ATTENDED, BRANCH, INNER, OUTER = range(1, 5)


class Dropout(NamedTuple):
    """What one place drops."""

    key: int
    threshold: int

    @property
    def scale(self) -> float:
        """The factor of what is kept, so that means stay as they are."""
        return _LEVELS / (_LEVELS - self.threshold)

    def drop(self, x: Tensor) -> Tensor:
        """Set elements to zero and scale the others."""
        return x * kept(self, tuple(x.shape)).to(x.device) * self.scale


def mix(word: int) -> int:
    """Hash a 32-bit number."""
    word = (word ^ (word >> 16)) * _FIRST & _WORD
    word = (word ^ (word >> 15)) * _SECOND & _WORD
    return word ^ (word >> 16)


def make_dropout(seed: int | None, place: int, rate: float) -> Dropout | None:
    """Choose what one place drops."""
    if seed is None or rate == 0:
        return None
    key = 0
    for word in (seed & _WORD, seed >> 32 & _WORD, seed >> 64 & _WORD, place):
        key = mix((key * 31 + word + 0x9E3779B9) & _WORD)
    return Dropout(key, min(round(rate * _LEVELS), _LEVELS - 1))


def kept(dropout: Dropout, shape: tuple[int, ...]) -> Tensor:
    """Say which elements a place keeps."""
    count = 1
    for size in shape:
        count *= size
    x = torch.arange(count).add_(dropout.key).bitwise_and_(_WORD)
    x = (x ^ (x >> 16)).mul_(_FIRST).bitwise_and_(_WORD)
    x = (x ^ (x >> 15) ^ dropout.key).mul_(_SECOND).bitwise_and_(_WORD)
    return ((x ^ (x >> 16)) >> 16 >= dropout.threshold).view(shape)


class LayerDropout(NamedTuple):
    """What the places of one layer of an encoder drop: nothing without a seed."""

    seed: int | None = None
    layer: int = 0

    def at(self, place: int, rate: float) -> Dropout | None:
        """Choose what a place of the layer drops."""
        return make_dropout(self.seed, PER_LAYER * self.layer + place, rate)

    def of_heads(self, rate: float) -> Dropout | None:
        """Choose what attention drops."""
        return self.at(ATTENDED, rate)

    def drop(self, x: Tensor, rate: float, place: int = ATTENDED) -> Tensor:
        """Drop at a place of the layer."""
        dropout = self.at(place, rate)
        return x if dropout is None else dropout.drop(x)
