"""Processes that work on one run together, as `torchrun` starts them.

Every process holds the whole model. They differ in the rows that they see, and the
first of them alone writes. A process without others has nobody to talk to, and all of
this costs it nothing.
"""

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from coulomb._support.errors import CoulombError

if TYPE_CHECKING:
    from torch import Tensor


# A process that dies is noticed at once; one that hangs, or whose machine is cut off,
# after what no step takes. While others wait, one of them may work alone for long.
_STEP, _ALONE = timedelta(minutes=30), timedelta(hours=12)


class LostProcessError(CoulombError):
    """Another process of the run ended."""


def launched_rank() -> int:
    """Tell the number that a launcher gave this process, 0 without one."""
    number = os.environ.get("RANK", "0")
    return int(number) if number.isdecimal() else 0


class Ranks(NamedTuple):
    """A process among those of its run."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls) -> "Ranks":
        """Meet the processes that a launcher started; alone without one."""
        import torch
        from torch import distributed

        if not distributed.is_available():
            return cls()
        if not distributed.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) < 2:
                return cls()
            with cls(0, 2).talking():
                # Both, because nccl refuses tensors of the CPU.
                gpu = torch.cuda.is_available() and distributed.is_nccl_available()
                backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
                distributed.init_process_group(backend, timeout=_STEP)
                _patient()
            atexit.register(distributed.destroy_process_group)
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def block(self, count: int) -> slice:
        """Give this process its part of a range.

        Examples
        --------
        >>> Ranks(1, 3).block(10)
        slice(3, 6, None)
        """
        bounds = [count * rank // self.world for rank in (self.rank, self.rank + 1)]
        return slice(*bounds)

    def split(self, lengths: "Tensor") -> list["Tensor"]:
        """Share rows out, so that all processes get about as many tokens.

        The longest row goes to whoever has least, then the next. Rows that are fewer
        than the processes are given to all of them.

        Examples
        --------
        >>> import torch
        >>> Ranks(0, 2).split(torch.tensor([5, 9, 1, 4]))
        [tensor([1, 2]), tensor([0, 3])]
        """
        import torch

        if len(lengths) < self.world:
            return [torch.arange(len(lengths))] * self.world
        shares: list[list[int]] = [[] for _ in range(self.world)]
        tokens = [0] * self.world
        for row in lengths.argsort(descending=True, stable=True).tolist():
            least = min(range(self.world), key=lambda r: (tokens[r], len(shares[r])))
            shares[least].append(row)
            tokens[least] += int(lengths[row])
        return [torch.tensor(sorted(rows), dtype=torch.long) for rows in shares]

    def own(self, lengths: "Tensor") -> Any:
        """Pick one's own share of rows, all of them without other processes."""
        return slice(None) if self.world == 1 else self.split(lengths)[self.rank]

    def add(self, tensors: "Sequence[Tensor]") -> None:
        """Add up tensors of all processes, in place and in one message."""
        import torch
        from torch import distributed

        if self.world == 1:
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        with self.talking():
            distributed.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def gather(self, x: "Tensor", dim: int = 0) -> "Tensor":
        """Put the rows of all processes together; gradients are of one's own rows."""
        import torch
        from torch import distributed

        if self.world == 1:
            return x
        own = x.movedim(dim, 0).contiguous()
        count = torch.tensor([len(own)], device=own.device)
        counts = [torch.empty_like(count) for _ in range(self.world)]
        with self.talking():
            distributed.all_gather(counts, count)
            most = int(max(counts))
            padded = own.new_zeros(most, *own.shape[1:])
            padded[: len(own)] = own.detach()
            parts = [torch.empty_like(padded) for _ in counts]
            distributed.all_gather(parts, padded)
        parts = [part[: int(n)] for part, n in zip(parts, counts, strict=True)]
        parts[self.rank] = own
        return torch.cat(parts).movedim(0, dim)

    def share(self, value: Any) -> Any:
        """Give all processes what the first has; the others wait for it."""
        from torch import distributed

        if self.world == 1:
            return value
        held = [value]
        with self.talking():
            distributed.broadcast_object_list(held, group=_patient())
        return held[0]

    def collect(self, value: Any) -> list[Any]:
        """Give all processes what each of them has, in their order."""
        from torch import distributed

        if self.world == 1:
            return [value]
        held = [None] * self.world
        with self.talking():
            distributed.all_gather_object(held, value, group=_patient())
        return held

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.share(None)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Let the first process through the block, and then the others."""
        if not self.writes:
            self.wait()
        yield
        if self.writes:
            self.wait()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Say that another process ended if a message to it fails."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1:
                raise
            raise LostProcessError(
                "Another process of this run ended, or does not answer, so all stop. "
                "What was saved is whole. "
                f"({(str(error) or '?').splitlines()[0]:.80})"
            ) from error


ALONE = Ranks()


@cache
def _patient() -> Any:
    """Give the group in which processes wait for what one of them does."""
    from torch import distributed

    return distributed.new_group(timeout=_ALONE, backend="gloo")


def speaks_first() -> bool:
    """Say whether no other process of the run has said yet why it ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return True
    from torch import distributed

    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=10)
        store = distributed.TCPStore(*place, is_master=False, timeout=wait)  # type: ignore[attr-defined]
        return bool(store.add("coulomb/ended", 1) == 1)
    except (RuntimeError, KeyError, ValueError):  # whoever held it is gone
        return True
