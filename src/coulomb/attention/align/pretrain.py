"""A warm-up before Phase A: some epochs of cross-entropy with the particles at rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count, check_real
from coulomb._support.streams import make_generator
from coulomb.attention.align.batches import Batch, as_batch
from coulomb.attention.align.energies import IGNORED
from coulomb.attention.align.model_as_function import ParticleLayers, training
from coulomb.attention.align.sampler import WARM_UP, batch_of_step


def call_for_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Call a model that returns logits, or a tuple that begins with them."""
    out = model(*batch.arguments, **batch.keywords)
    out = getattr(out, "logits", out)
    logits: Tensor = out[0] if isinstance(out, tuple | list) else out
    return logits


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """Train everything but the particles for some epochs, with Adam.

    Dropout draws from torch's own generator, which is seeded inside and put back.

    Parameters
    ----------
    epochs
        How often all batches are gone through.
    lr
        Adam's.
    seed
        Of order and dropout.
    logits
        A function of model and `Batch`.

    Examples
    --------
    >>> CrossEntropy(epochs=2).lr
    0.0002
    """

    epochs: int = 1
    lr: float = 2e-4
    seed: int = 0
    logits: Callable[[nn.Module, Batch], Tensor] = call_for_logits

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, at_least=0)
        check_real("lr", self.lr, above=0)

    def __call__(self, model: nn.Module, batches: Sequence[Any]) -> list[float]:
        """Train the model."""
        resting = set(ParticleLayers.find(model).keys)
        moving = [
            parameter
            for name, parameter in model.named_parameters()
            if name not in resting and parameter.requires_grad
        ]
        optimiser = torch.optim.Adam(moving, self.lr)
        losses = []
        numbers = tuple(range(len(batches)))
        with torch.random.fork_rng(), training(model):
            torch.default_generator.set_state(
                make_generator(self.seed, WARM_UP).get_state()
            )
            for step in range(self.epochs * len(numbers)):
                number = batch_of_step(step, numbers, self.seed)
                batch = as_batch(batches[number])
                logits = self.logits(model, batch)
                loss = functional.cross_entropy(
                    logits.flatten(0, -2), batch.labels.flatten(), ignore_index=IGNORED
                )
                grads = torch.autograd.grad(loss, moving, allow_unused=True)
                for parameter, grad in zip(moving, grads, strict=True):
                    parameter.grad = grad
                optimiser.step()
                losses.append(float(loss.detach()))
            optimiser.zero_grad()
        size = max(1, len(numbers))
        return [sum(losses[i : i + size]) / size for i in range(0, len(losses), size)]
