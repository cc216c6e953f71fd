"""What Phase A is asked to do, and the problem that a model and its data make of it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coulomb._support.checks import (
    check_count,
    check_member,
    check_real,
    check_seed,
    make_generator,
)
from coulomb._support.errors import ParameterError, ParameterTypeError, shown
from coulomb._support.ranks import ALONE, Ranks
from coulomb.attention.align.scores import (
    IGNORED,
    AbstractScore,
    Rows,
    as_score,
    shuffled,
)
from coulomb.domains import AbstractDomain, Ball, Space
from coulomb.dynamics.langevin import (
    AbstractGradientSampler,
    AbstractSchedule,
    AdamLangevin,
    samplers,
)
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.objectives import AbstractObjective, AbstractOneBody, Field

Pool = str | Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class AlignmentSettings:
    """What Phase A is asked to do. The defaults are the library's; see `PAPER`.

    Parameters
    ----------
    objective
        "centred", "within-class", "likelihood", "target", or a score.
    level
        "sequence", "token", "layer" or "head"; see `View`.
    pool
        "mean", "cls" or a function of outputs and key mask.
    output
        None for the outputs of the attention layers (what the model returns for the
        objective "likelihood"), "" for what the model returns, or the name of the
        module whose output counts.
    layers
        Names of the layers whose particles move; None for all.
    sampler
        "langevin", or "adam" for steps preconditioned as in Adam, without noise: every
        coordinate moves about `step_size`, however weak the force.
    step_size
        `eta`.
    inverse_temperature
        `beta`, a number or a schedule; infinity is gradient flow.
    drift
        "N" for `N grad_k H`, "plain" for `grad_k H`.
    clip
        The largest norm of a particle's drift, before the step size.
    interaction
        Between the particles of one head.
    strength
        `lambda`.
    domain
        Where particles may be; a ball bounds their norms.
    prior
        A one-body energy of the particles; None for none.
    max_epochs
        How often all batches are gone through, at most.
    max_steps
        The last step; None leaves it to `max_epochs`.
    tol
        Stop when no particle moved farther between the means of two windows of records;
        0 never does.
    patience
        Stop when held-out alignment has not improved for so many records; None never.
    record_every
        Steps between records; None for four an epoch, but at most ten in all.
    watched
        How many training batches the recorded alignment is over.
    also
        Other parameters that move, by plain gradient steps: "norm", "value", or parts
        of their names.
    also_step_size
        The step of those.
    """

    objective: str | AbstractScore = "centred"
    level: str = "sequence"
    pool: Pool = "mean"
    output: str | None = None
    layers: tuple[str, ...] | None = None
    sampler: str = "langevin"
    step_size: float = 1.0
    inverse_temperature: float | AbstractSchedule = 1e5
    drift: str = "N"
    clip: float = 1.0
    interaction: AbstractInteraction = field(default_factory=Riesz)
    strength: float = 1e-3
    domain: AbstractDomain = field(default_factory=Space)
    prior: AbstractOneBody | None = None
    max_epochs: int = 10
    max_steps: int | None = None
    tol: float = 0.0
    patience: int | None = None
    record_every: int | None = None
    watched: int = 4
    also: tuple[str, ...] = ()
    also_step_size: float = 1e-2

    def __post_init__(self) -> None:
        check_count("max_epochs", self.max_epochs, at_least=0)
        if self.record_every is not None:
            check_count("record_every", self.record_every)
        check_count("watched", self.watched)
        check_real("strength", self.strength, at_least=0, at_most=1e8)
        check_member("drift", self.drift, ("N", "plain"))
        built = self.build_sampler()
        if isinstance(built, AdamLangevin) and self.inverse_temperature != math.inf:
            # Noise that is scaled by the gradient would leave no control without it.
            raise ParameterError(
                "`inverse_temperature` must be infinite with the sampler 'adam'; got "
                f"{self.inverse_temperature}. Use 'langevin' to have noise."
            )
        check_real("also_step_size", self.also_step_size, above=0)
        for name in ("layers", "also"):
            names = getattr(self, name)
            known = isinstance(names, tuple | list) or (name, names) == ("layers", None)
            if not known or not all(isinstance(x, str) for x in names or ()):
                raise ParameterTypeError(
                    f"`{name}` must be a tuple of names; got {shown(names)}."
                )

    def build_sampler(self) -> AbstractGradientSampler:
        """Build what moves the particles along the gradient of a batch.

        Returns
        -------
        AbstractGradientSampler
            The member of `samplers` that `sampler` names.
        """
        built = samplers.build(
            self.sampler,
            step_size=self.step_size,
            inverse_temperature=self.inverse_temperature,
            domain=self.domain,
            clip=self.clip,
        )
        if not isinstance(built, AbstractGradientSampler):
            raise ParameterError(
                f"`sampler` must need the gradient only; got {self.sampler!r}. Use "
                "'langevin' or 'adam'."
            )
        return built

    def changed(self, changes: dict[str, Any]) -> "AlignmentSettings":
        """Replace some settings.

        Parameters
        ----------
        changes
            New values by name.

        Returns
        -------
        AlignmentSettings
            A copy.
        """
        known = [setting.name for setting in fields(self)]
        for name in changes:
            check_member("settings", name, known)
        return replace(self, **changes)


# The paper's Phase A [CPM "Experimental setup"]; no setting is left to a default.
PAPER = AlignmentSettings(
    objective="within-class",
    level="sequence",
    pool="mean",
    output=None,
    layers=None,
    sampler="langevin",
    step_size=2e-3,
    inverse_temperature=50.0,
    drift="N",
    clip=10.0,
    interaction=Riesz(s=0.0),
    strength=1e-3,
    domain=Ball(1.5),
    prior=None,
    max_epochs=10,
    max_steps=None,
    tol=1e-6,
    patience=None,
    record_every=None,
    watched=4,
    also=(),
    also_step_size=2e-3,
)


LEVELS = ("sequence", "token", "layer", "head")
# Paths of the random streams that belong to one seed.
MOVES, ORDER, HELD_OUT, SHUFFLES, TWINS, PRETRAIN = range(6)
# Names that may hold the labels and the mask of a batch given as a mapping.
_LABELS = ("labels", "label")
_MASKS = ("key_mask", "attention_mask")

Parameters = dict[str, Tensor]


class Batch(NamedTuple):
    """What the model is called with, which tokens are real, and the target."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    key_mask: Tensor | None  # (batch, length), True = real token
    labels: Tensor
    counted: bool = True  # among several processes, if the rows are one's own


def as_batch(item: Any) -> Batch:
    """Read a batch given as `(inputs, labels)`, with a mask, or as a mapping.

    Examples
    --------
    >>> import torch
    >>> as_batch((torch.ones(2, 3), torch.tensor([0, 1]))).labels
    tensor([0, 1])
    """
    if isinstance(item, Batch):
        return item
    if isinstance(item, Mapping):
        words = dict(item)
        name = next((name for name in _LABELS if name in words), None)
        if name is None:
            raise ParameterError(
                f"`batches` must hold 'labels'; got the names {sorted(words)}."
            )
        labels = _as_labels(words.pop(name))
        mask = next((words[name] for name in _MASKS if name in words), None)
        return Batch((), words, _as_mask(mask), labels)
    if isinstance(item, tuple | list) and len(item) in (2, 3):
        inputs, *between, labels = item
        mask = between[0] if between else None
        words = {} if mask is None else {"key_mask": mask}
        return Batch((inputs,), words, _as_mask(mask), _as_labels(labels))
    raise ParameterTypeError(
        "`batches` must hold (inputs, labels), (inputs, key_mask, labels) or mappings; "
        f"got {type(item).__name__}."
    )


def _as_mask(mask: Any) -> Tensor | None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ParameterTypeError(
            "`key_mask` must be a tensor of shape (batch, length); got "
            f"{shown(tuple(mask.shape) if isinstance(mask, Tensor) else mask)}."
        )
    return None if mask is None else mask.bool()


def _as_labels(labels: Any) -> Tensor:
    try:
        if (found := torch.as_tensor(labels)).is_complex():
            raise TypeError
        return found
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterTypeError(
            "`labels` must be a tensor of class numbers or real targets; got "
            f"{shown(labels)}. Number the classes, as sklearn's LabelEncoder does."
        ) from error


def as_batches(batches: Iterable[Any]) -> Sequence[Any]:
    """Make batches that can be asked for by number."""
    indexed = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
    if isinstance(batches, Tensor | Mapping) or not (
        indexed or hasattr(batches, "__iter__")
    ):
        raise ParameterTypeError(
            "`batches` must be a sequence of batches, or give one when iterated; got "
            f"{type(batches).__name__}."
        )
    found: Sequence[Any] = batches if indexed else list(batches)  # type: ignore[assignment]
    if not len(found):
        raise ParameterError("`batches` must hold at least one batch; got none.")
    return found


# Calls a model with other parameters; what it may return says `Network`.
Evaluate = Callable[[nn.Module, Parameters, Batch], Any]


@dataclass(frozen=True)
class ParticleLayers:
    """Where a model keeps its particles, in the order of its modules."""

    names: tuple[str, ...]

    @classmethod
    def find(
        cls, model: nn.Module, chosen: Sequence[str] | None = None
    ) -> "ParticleLayers":
        """Look for modules with particles `(heads, n, dim)` and a feature map."""
        shapes = _particle_shapes(model)
        for name in chosen or ():
            check_member("layers", name, shapes)
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
        parts = [attrgetter(key)(model).detach() for key in self.keys]
        positions = torch.stack(parts)
        return positions.to(torch.promote_types(positions.dtype, torch.float32))

    def write(self, model: nn.Module, positions: Tensor) -> None:
        """Copy particles into the model."""
        with torch.no_grad():
            for key, part in zip(self.keys, positions, strict=True):
                attrgetter(key)(model).copy_(part)


def _particle_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    if not isinstance(model, nn.Module):
        raise ParameterTypeError(
            f"`model` must be a torch module; got {type(model).__name__}."
        )
    shapes, seen = {}, set()
    for name, module in model.named_modules():
        particles = getattr(module, "particles", None)
        if not isinstance(particles, Tensor) or not hasattr(module, "feature_map"):
            continue
        if id(particles) not in seen:  # shared layers have one set of particles
            seen.add(id(particles))
            shapes[name] = tuple(particles.shape)
    return shapes


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
        if self.output is not None:
            check_member("output", self.output, dict(self.model.named_modules()))

    def __call__(self, positions: Tensor, batch: Batch) -> list[Tensor]:
        """Evaluate the model with its particles at `positions`.

        A list that a function of one's own returns is the features of the layers. Else
        they are what the model returns, or what modules gave while it was evaluated.
        """
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        parameters.update(self.free)
        for key, part in zip(self.layers.keys, positions, strict=True):
            parameters[key] = part.to(parameters.get(key, part).dtype)
        names = [self.output] if self.output else []
        if self.output is None:
            names = list(self.layers.names)
        kept: list[Tensor] = []
        with ExitStack() as stack:
            for name in names:
                module = self.model.get_submodule(name)
                stack.enter_context(_recording(module, kept, self.output is None))
            out = self.evaluate(self.model, parameters, batch)
        if isinstance(out, list) and self.evaluate is not call_model:
            every = _particle_shapes(self.model)
            if self.output is None and len(out) == len(every):
                of_layer = dict(zip(every, out, strict=True))
                out = [of_layer[name] for name in names]
            return [_tensor(part) for part in out]
        if not names:
            return [_tensor(out)]
        if not kept:
            raise ParameterError(
                f"`evaluate` must call the modules {names}; none was reached. "
                "They may be bypassed by a fused path: pass output='' to use what the "
                "model returns."
            )
        return kept

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
def _recording(module: nn.Module, kept: list[Tensor], heads: bool) -> Iterator[None]:
    """Keep what a module gives; of a particle layer, what enters its projection."""
    shadowed = getattr(module, "out_proj", None) if heads else None
    inputs = isinstance(shadowed, nn.Module)
    shadowed = shadowed if isinstance(shadowed, nn.Module) else module
    swapped = not inputs and heads and getattr(module, "batch_first", True) is False
    own, forward = "forward" in vars(shadowed), shadowed.forward

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        out = forward(*arguments, **keywords)
        found = _tensor(arguments if inputs else out)
        kept.append(found.transpose(0, 1) if swapped else found)
        return out

    vars(shadowed)["forward"] = recorded
    try:
        yield
    finally:
        del vars(shadowed)["forward"]
        if own:
            vars(shadowed)["forward"] = forward


def _tensor(out: Any) -> Tensor:
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise ParameterTypeError(
            "`evaluate` must give a tensor, or a tuple that begins with one; got "
            f"{type(out).__name__}. Pass an `evaluate` that picks the tensor."
        )
    return out


@dataclass(frozen=True)
class View:
    """Which output vectors are compared."""

    level: str = "sequence"
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        check_member("level", self.level, LEVELS)
        if isinstance(self.pool, str):
            check_member("pool", self.pool, ("mean", "cls"))

    def rows(
        self, outputs: Sequence[Tensor], batch: Batch, heads: int, *, pairwise: bool
    ) -> list[Rows]:
        """Pick the vectors out of a batch's outputs."""
        every = self.level in ("layer", "head")
        chosen = outputs if every else outputs[-1:]
        picked = [self._pick(out, batch, pairwise) for out in chosen]
        if self.level == "head":  # (heads, *groups, n, dim)
            for number, rows in enumerate(picked):
                split = rows.features.reshape(*rows.features.shape[:-1], heads, -1)
                picked[number] = rows._replace(features=split.movedim(-2, 0))
        return picked

    def _pick(self, out: Tensor, batch: Batch, pairwise: bool) -> Rows:
        labels, mask = batch.labels, batch.key_mask
        real = labels.is_floating_point()
        by_token = self.level == "token" or (
            self.level != "sequence"
            and (labels.ndim == 3 or (labels.ndim == 2 and not real))
        )
        if by_token:
            self._check_rows(labels, out, ("batch", "length"), pairwise)
            if mask is None:
                mask = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
            if pairwise:
                share = mask.to(out) / mask.sum(dim=-1, keepdim=True).clamp_min(1)
                return Rows(out, labels, share)
            kept = mask if real else mask & (labels != IGNORED)
            return Rows(out[kept], labels[kept])
        self._check_rows(labels, out, ("batch",), pairwise)
        return Rows(self._pooled(out, mask), labels)

    def _pooled(self, out: Tensor, mask: Tensor | None) -> Tensor:
        if out.ndim == 2:
            return out
        if callable(self.pool):
            return self.pool(out, mask)
        if self.pool == "cls":
            return out[:, 0]
        if mask is None:
            return out.mean(dim=1)
        weight = mask.to(out).unsqueeze(-1)
        return (weight * out).sum(dim=1) / weight.sum(dim=1).clamp_min(1)

    def _check_rows(
        self, labels: Tensor, out: Tensor, axes: tuple[str, ...], pairwise: bool
    ) -> None:
        n = len(axes)
        most = n + (pairwise or labels.is_floating_point())
        fits = n <= labels.ndim <= most and out.ndim > n
        if not fits or labels.shape[:n] != out.shape[:n]:
            more = " and at most one more" if most > n else ""
            raise ParameterError(
                f"`labels` must have the axes ({', '.join(axes)}) of the outputs at "
                f"level {self.level!r}{more}; got {tuple(labels.shape)} and outputs "
                f"{tuple(out.shape)}."
            )


@dataclass(frozen=True, eq=False)
class ModelAlignment(AbstractObjective):
    """Minus the mean score of a model's outputs over batches.

    `E(w) = -(1/B) sum_b mean_layers A(F_b(w), Y_b)`, a number shared by all groups
    `(layers, heads)` of particles.
    """

    network: Network
    score: AbstractScore
    view: View
    batches: Sequence[Any]
    numbers: tuple[int, ...]
    shuffle: int | None = None
    ranks: Ranks = ALONE

    def energy(self, particles: Particles) -> Tensor:
        parts = [self.score_batch(particles, number) for number in self.numbers]
        return -torch.stack(parts).mean()

    def score_batch(self, particles: Particles, number: int) -> Tensor:
        """Score one batch."""
        return self.score_rows(self.rows(particles, number))

    def rows(self, particles: Particles, number: int) -> list[Rows]:
        """Evaluate the model on one batch and pick what is compared."""
        batch = as_batch(self.batches[number])
        outputs = self.network(particles.positions, batch)
        heads, pairwise = particles.positions.shape[1], self.score.pairwise
        picked = self.view.rows(outputs, batch, heads, pairwise=pairwise)
        if self.ranks.world > 1:
            picked = [self._gathered(rows, batch.counted) for rows in picked]
        if self.shuffle is None:
            return picked
        return self.shuffle_rows(picked, make_generator(self.shuffle, number))

    def _gathered(self, rows: Rows, counted: bool) -> Rows:
        """Put the rows of all processes together; a score is of the whole batch."""
        features, target, _ = rows
        if not counted:
            features, target = features[..., :0, :], target[:0]
        gather = self.ranks.gather
        return Rows(gather(features, dim=-2), gather(target))

    def shuffle_rows(
        self, picked: Sequence[Rows], generator: torch.Generator
    ) -> list[Rows]:
        """Give every vector the target of another."""
        return shuffled(picked, generator, self.score.pairwise)

    def score_rows(self, picked: Sequence[Rows]) -> Tensor:
        """Average the score over layers and groups."""
        values = [
            self.score(rows).mean()
            if rows.features.shape[-2] > 1
            else 0 * rows.features.sum()
            for rows in picked
        ]
        return torch.stack(values).mean()

    def field(self, particles: Particles) -> Field:
        return self.forces(particles)[0]

    def forces(self, particles: Particles) -> tuple[Field, dict[str, Tensor]]:
        """Evaluate what moves the particles, and the other parameters that may move."""
        free = {
            name: value.detach().requires_grad_(True)
            for name, value in self.network.free.items()
        }
        objective = replace(self, network=replace(self.network, free=free))
        positions = particles.positions.detach().requires_grad_(True)
        moving = particles._replace(positions=positions)
        leaves = (positions, *free.values())
        sums = [torch.zeros_like(leaf) for leaf in leaves]
        energy = positions.new_zeros(())
        with torch.enable_grad():
            for number in self.numbers:
                part = -objective.score_batch(moving, number) / len(self.numbers)
                grads = torch.autograd.grad(part, leaves, allow_unused=True)
                for total, grad in zip(sums, grads, strict=True):
                    if grad is not None:
                        total += grad
                energy += part.detach()
        self.ranks.add(sums)
        potential = energy.expand(positions.shape[:-1])
        field = Field(potential, particles.n_particles * sums[0])
        return field, dict(zip(free, sums[1:], strict=True))


@dataclass(frozen=True, eq=False)
class NoAlignment(AbstractObjective):
    """No attraction at all: what is left is repulsion and noise.

    Examples
    --------
    >>> NoAlignment().energy(Particles(torch.ones(2, 3, 1)))
    tensor([0., 0.])
    """

    def energy(self, particles: Particles) -> Tensor:
        return particles.positions.new_zeros(particles.positions.shape[:-2])

    def field(self, particles: Particles) -> Field:
        still = torch.zeros_like(particles.positions)
        return Field(still[..., 0], still)


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its data and what is asked: everything but the particles."""

    settings: AlignmentSettings
    objective: ModelAlignment
    training: tuple[int, ...]
    held_out: ModelAlignment | None
    seed: int

    @property
    def network(self) -> Network:
        """The model as a function of its particles."""
        return self.objective.network

    @property
    def last_step(self) -> int:
        """Where the run ends if no rule ends it before."""
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        return self.settings.max_epochs * len(self.training)

    def energy(self, objective: AbstractObjective) -> Hamiltonian:
        """Build the Hamiltonian of an objective."""
        chosen = self.settings
        return Hamiltonian(objective, chosen.interaction, chosen.strength, chosen.prior)


def build_problem(
    model: nn.Module,
    batches: Iterable[Any],
    settings: AlignmentSettings,
    *,
    held_out: Iterable[Any] | float | None = 0.2,
    evaluate: Evaluate | None = None,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> Problem:
    """Put a model, its data and the settings together; nothing is computed."""
    check_seed("seed", seed)
    every = as_batches(batches)
    layers = ParticleLayers.find(model, settings.layers)
    score = as_score(settings.objective)
    if score.pairwise and ranks.world > 1:
        raise ParameterError(
            f"`ranks` must be one process for the objective {score.label()!r}, which "
            f"compares pairs; got {ranks.world}. Give every process the whole batches."
        )
    output = settings.output
    if score.of_logits:
        output = output or ""
        if settings.level not in ("sequence", "token"):
            raise ParameterError(
                f"`level` must be 'sequence' or 'token' for the objective "
                f"{score.label()!r}; got {settings.level!r}."
            )
    network = Network(model, layers, evaluate or call_model, output)
    network.free.update(network.free_from(settings.also))
    view = View(settings.level, settings.pool)
    training, other = tuple(range(len(every))), None
    objective = ModelAlignment(network, score, view, every, training, ranks=ranks)
    if isinstance(held_out, int | float):
        share = check_real("held_out", held_out, at_least=0, below=1)
        count = max(1, round(share * len(every))) if share and len(every) > 1 else 0
        generator = make_generator(seed, HELD_OUT)
        mixed = torch.randperm(len(every), generator=generator).tolist()
        training = tuple(sorted(mixed[count:]))
        if count:
            other = replace(objective, numbers=tuple(sorted(mixed[:count])))
    elif held_out is not None:
        given = as_batches(held_out)
        other = replace(objective, batches=given, numbers=tuple(range(len(given))))
    watched = replace(objective, numbers=training[: settings.watched])
    labels = [as_batch(every[number]).labels for number in watched.numbers]
    _check_labels_vary([ranks.gather(part.flatten()) for part in labels])
    return Problem(settings, watched, training, other, seed)


def _check_labels_vary(labels: Sequence[Tensor]) -> None:
    """Refuse batches whose labels are all the same; a batch alone may be of one."""
    for part in labels:
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise ParameterError("`labels` must be finite; got NaN or infinity.")
    found = {label for part in labels for label in part[part != IGNORED].tolist()}
    if len(found) < 2:
        raise ParameterError(
            "`batches` must hold different labels, which are what particles learn "
            f"from; the first {len(labels)} have only {sorted(found)}. Shuffle the "
            "rows, or give more of them."
        )
