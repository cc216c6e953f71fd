"""A running average of weights, which forgets what is long ago."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Adding every step would cost several per cent of training; a short memory needs it.
_LONGEST, _OF_MEMORY = 8, 4


class RunningAverage:
    """The average `a <- d a + (1 - d) w` of the parameters that are trained.

    With memory `T`, in steps, what is `t` steps ago has the weight `exp(-t / T)`; near
    the start the average is over the few steps there are.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = RunningAverage(model, 100.0)
    >>> before = model.weight.item()
    >>> _ = model.weight.data.add_(1.0)
    >>> average.add(8)
    >>> with average.in_place():
    ...     before < model.weight.item() < before + 1
    True
    """

    def __init__(self, model: nn.Module, memory: float) -> None:
        self.memory = memory
        self.every = max(1, min(_LONGEST, int(memory / _OF_MEMORY)))
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and memory
        }
        self._averages: dict[str, Tensor] = {}
        self._begun = 0
        self.restart(0)

    def restart(self, step: int) -> None:
        """Forget everything but the present weights."""
        self._begun = step
        self._averages = {n: p.detach().clone() for n, p in self._parameters.items()}

    def add(self, step: int) -> None:
        """Take the present weights into the average, if it is their turn."""
        if not self._averages or step % self.every:
            return
        made = step - self._begun
        memory = min(self.memory, (made + self.every) / 2)
        torch._foreach_lerp_(
            list(self._averages.values()),
            [parameter.detach() for parameter in self._parameters.values()],
            -math.expm1(-self.every / memory),
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in place of the weights while the block runs."""
        kept = {n: p.detach().clone() for n, p in self._parameters.items()}
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(kept)

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def tensors(self) -> dict[str, Tensor]:
        """Give what a checkpoint needs."""
        if not self._averages:
            return {}
        begun = torch.tensor(self._begun)
        return {**self._averages, "begun": begun}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        for name, average in self._averages.items():
            average.copy_(tensors[name])
        if self._averages:
            self._begun = int(tensors["begun"])
