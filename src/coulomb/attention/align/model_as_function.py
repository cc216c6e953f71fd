"""A model as a function of its particles: read them, evaluate, write them back.

Nothing of the model changes while it is evaluated: parameters are replaced for the
duration of a call, hooks and the evaluation mode are taken back afterwards.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coulomb._support.errors import ParameterError, ParameterTypeError, unknown_name
from coulomb.attention.align.batches import Batch

Parameters = dict[str, Tensor]
Evaluate = Callable[[nn.Module, Parameters, Batch], Any]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off in the block, and every module back to its own mode after it."""
    with _in_mode(model, train=False):
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Turn dropout on in the block, and every module back to its own mode after it."""
    with _in_mode(model, train=True):
        yield


@contextmanager
def _in_mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(train)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class ParticleLayers:
    """Where a model keeps its particles, in the order of its modules."""

    names: tuple[str, ...]

    @classmethod
    def find(
        cls, model: nn.Module, chosen: Sequence[str] | None = None
    ) -> "ParticleLayers":
        """Look for modules with particles `(heads, n, dim)` and a feature map."""
        shapes, seen = {}, set()
        for name, module in model.named_modules():
            particles = getattr(module, "particles", None)
            if not isinstance(particles, Tensor) or not hasattr(module, "feature_map"):
                continue
            if id(particles) not in seen:  # shared layers have one set of particles
                seen.add(id(particles))
                shapes[name] = tuple(particles.shape)
        for name in chosen or ():
            if name not in shapes:
                raise unknown_name("layers", name, shapes)
        names = tuple(name for name in shapes if chosen is None or name in chosen)
        if not names:
            raise ParameterError(
                "`model` must have layers with `particles` and a `feature_map`, such "
                f"as KernelAttention; got {type(model).__name__} without any."
            )
        first = names[0]
        for name in names:
            if len(shapes[name]) != 3 or shapes[name] != shapes[first]:
                raise ParameterError(
                    "`model` must have particles (heads, n_particles, dim) of one "
                    f"shape; got {shapes[first]} in {first!r} and {shapes[name]} in "
                    f"{name!r}. Align them one after the other with `layers=`."
                )
        return cls(names)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(f"{name}.particles".lstrip(".") for name in self.names)

    def read(self, model: nn.Module) -> Tensor:
        """Copy the particles out of the model, in at least float32."""
        parts = [self._of(model, name).detach() for name in self.names]
        positions = torch.stack(parts)
        return positions.to(torch.promote_types(positions.dtype, torch.float32))

    def write(self, model: nn.Module, positions: Tensor) -> None:
        """Copy particles into the model."""
        with torch.no_grad():
            for name, part in zip(self.names, positions, strict=True):
                self._of(model, name).copy_(part)

    @staticmethod
    def _of(model: nn.Module, name: str) -> Tensor:
        particles = model.get_submodule(name).particles
        assert isinstance(particles, Tensor)
        return particles


def call_model(model: nn.Module, parameters: Parameters, batch: Batch) -> Any:
    """Call a model with other parameters, without touching it."""
    return functional_call(model, parameters, batch.arguments, batch.keywords)


@dataclass(frozen=True, eq=False)
class Network:
    """A model whose outputs are a function of its particles."""

    model: nn.Module
    layers: ParticleLayers
    evaluate: Evaluate = call_model
    output: str | None = None
    free: Parameters = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = dict(self.model.named_modules())
        if self.output is not None and self.output not in names:
            raise unknown_name("output", self.output, names)

    def __call__(self, positions: Tensor, batch: Batch) -> list[Tensor]:
        """Evaluate the model with its particles at `positions`."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        parameters.update(self.free)
        for key, part in zip(self.layers.keys, positions, strict=True):
            like = parameters.get(key, part)
            parameters[key] = part.to(like.dtype)
        if self.output == "":
            return [_tensor(self.evaluate(self.model, parameters, batch))]
        caught: list[Tensor] = []
        names = self.layers.names if self.output is None else (self.output,)
        with ExitStack() as stack:
            for name in names:
                module = self.model.get_submodule(name)
                stack.enter_context(_catching(module, caught, self.output is None))
            self.evaluate(self.model, parameters, batch)
        if not caught:
            raise ParameterError(
                f"`evaluate` must call the modules {list(names)}; none was reached. "
                "They may be bypassed by a fused path: pass output='' to use what the "
                "model returns."
            )
        return caught

    def free_from(self, patterns: Sequence[str]) -> Parameters:
        """Copy the parameters that may move beside the particles."""
        chosen: Parameters = {}
        for pattern in patterns:
            parts = {"value": ("value", "v_proj")}.get(pattern, (pattern,))
            found = {
                name: parameter.detach().clone()
                for name, parameter in self.model.named_parameters()
                if name not in self.layers.keys and any(p in name for p in parts)
            }
            if not found:
                raise ParameterError(
                    f"`also` has {pattern!r}, which is in no parameter's name; they "
                    f"are {', '.join(n for n, _ in self.model.named_parameters())}."
                )
            chosen.update(found)
        return chosen

    def write_free(self) -> None:
        """Copy the parameters that moved into the model."""
        with torch.no_grad():
            for name, value in self.free.items():
                self.model.get_parameter(name).copy_(value)


@contextmanager
def _catching(module: nn.Module, caught: list[Tensor], heads: bool) -> Iterator[None]:
    """Keep what a module gives; of a particle layer, what enters its projection."""
    projection = getattr(module, "out_proj", None)
    if heads and isinstance(projection, nn.Module):

        def keep_input(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            caught.append(_tensor(arguments))

        handle = projection.register_forward_pre_hook(keep_input)
    else:

        def keep_output(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            out = _tensor(out)
            late = heads and getattr(module, "batch_first", True) is False
            caught.append(out.transpose(0, 1) if late else out)

        handle = module.register_forward_hook(keep_output)
    try:
        yield
    finally:
        handle.remove()


def _tensor(out: Any) -> Tensor:
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise ParameterTypeError(
            "`evaluate` must give a tensor, or a tuple that begins with one; got "
            f"{type(out).__name__}. Pass an `evaluate` that picks the tensor."
        )
    return out
