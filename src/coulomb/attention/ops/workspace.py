"""Arrays that are used again, from block to block and from call to call."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# What is kept between calls. Blocks fit the cache, so that this is rarely exceeded.
_MOST_BYTES = 1 << 25

_kept = threading.local()

# The slot of arrays that outlive the call, and are therefore not used again.
FRESH = -1


class Workspace:
    """Arrays by name, in the working precision.

    Fresh memory costs as much in page faults as the arithmetic on it. A caller who has
    to keep several blocks gives each a `slot` of its own, with its own set of arrays.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.slot = 0
        self._arrays: dict[tuple[str, int], Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """Give the array of this name in this shape, with whatever it contains."""
        if self.slot == FRESH:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        size = math.prod(shape)
        key = (name, self.slot)
        array = self._arrays.get(key)
        if array is None or array.numel() < size:
            # Arrays made in inference mode could not be used outside of it.
            with torch.inference_mode(False):
                array = torch.empty(size, dtype=self.dtype, device=self.device)
            self._arrays[key] = array
        return array[:size].view(shape)

    def zeros(self, *shape: int) -> Tensor:
        """Make an array that nobody else uses."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def bytes(self) -> int:
        """Count the memory of all arrays."""
        return sum(x.numel() * x.element_size() for x in self._arrays.values())


@contextmanager
def borrowed_workspace(dtype: torch.dtype, device: torch.device) -> Iterator[Workspace]:
    """Lend this thread's workspace, or a new one while it is lent already."""
    work: Workspace | None = getattr(_kept, "workspace", None)
    _kept.workspace = None
    if work is None or work.dtype != dtype or work.device != device:
        work = Workspace(dtype, device)
    work.slot = 0
    yield work
    if device.type == "cpu" and work.bytes() <= _MOST_BYTES:
        _kept.workspace = work
