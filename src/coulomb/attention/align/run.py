"""Phase A: take the particles out of a model, let labels move them, put them back.

The dynamics is the estimators': the same Hamiltonian, interactions, domains, Langevin
steps and run loop. Only the energy differs: it asks the model for its outputs.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.archive import read_archive
from coulomb._support.checks import check_count, check_real, make_generator
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb._support.ranks import Ranks
from coulomb.attention.align.problem import (
    MOVES,
    ORDER,
    PRETRAIN,
    AlignmentSettings,
    Batch,
    Evaluate,
    ModelAlignment,
    NoAlignment,
    ParticleLayers,
    Problem,
    as_batch,
    build_problem,
)
from coulomb.attention.layers.base import in_mode
from coulomb.dynamics import langevin, loop
from coulomb.dynamics.langevin import Info, State
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.objectives import AbstractObjective


@dataclass(eq=False)
class DriftStats:
    """What drift and noise added up to over a run."""

    start: Tensor
    drift: Tensor
    noise: float = 0.0

    @classmethod
    def of(cls, start: Tensor) -> "DriftStats":
        """Begin at zero."""
        return cls(start, torch.zeros_like(start, dtype=torch.float64))

    def drift_to_noise(self) -> Tensor:
        """Compare how far the alignment carried particles with their random walk.

        `|sum_t drift_t| / sqrt(n d sum_t 2 eta / beta_t)` in every group.
        """
        carried = self.drift.square().sum(dim=(-2, -1)).sqrt()
        n, dim = self.start.shape[-2:]
        walk = math.sqrt(n * dim * self.noise)
        return torch.where(carried > 0, carried / walk if walk else math.inf, carried)

    def record(self, run: loop.Run) -> None:
        """Add to the last record of a run: a callback that never ends it."""
        run.history[-1]["drift_to_noise"] = self.drift_to_noise().tolist()
        moved = root_mean_square(run.particles.positions - self.start)
        run.history[-1]["moved"] = moved.tolist()


def root_mean_square(moves: Tensor) -> Tensor:
    """Average the length of moves in every group."""
    return moves.double().square().sum(dim=-1).mean(dim=-1).sqrt()


def batch_of_step(step: int, numbers: Sequence[int], seed: int) -> int:
    """Tell which batch a step sees: every epoch goes through all, in an order drawn.

    Examples
    --------
    >>> sorted(batch_of_step(step, [5, 6, 7], seed=0) for step in range(3, 6))
    [5, 6, 7]
    """
    epoch, place = divmod(step, len(numbers))
    generator = make_generator(seed, ORDER, epoch)
    order = torch.randperm(len(numbers), generator=generator)
    return numbers[int(order[place])]


@dataclass(frozen=True, eq=False)
class BatchedSampler(langevin.AbstractSampler):
    """The steps of a sampler, each on the next batch."""

    problem: Problem
    stats: DriftStats

    @cached_property
    def sampler(self) -> langevin.AbstractGradientSampler:
        """What moves the particles."""
        return self.problem.settings.build_sampler()

    def init(self, particles: Particles) -> State:
        return self.sampler.init(particles)

    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        problem, settings = self.problem, self.problem.settings
        objective, particles = energy.objective, state.particles
        slopes: dict[str, Tensor] = {}
        if isinstance(objective, ModelAlignment):
            number = batch_of_step(state.step, problem.training, problem.seed)
            pull, slopes = replace(objective, numbers=(number,)).forces(particles)
        else:
            pull = objective.field(particles)
        scale = 1.0 if settings.drift == "N" else 1 / particles.n_particles
        gradient = scale * energy.gradient(
            particles, generator=generator, attraction=pull.gradient
        )
        following, info = self.sampler.move(state, gradient, generator=generator)
        self._add_up(state, scale * pull.gradient, gradient, info)
        free = problem.network.free
        for name, slope in slopes.items():
            free[name] = free[name] - settings.also_step_size * slope
        return following, info

    def _add_up(self, state: State, pull: Tensor, gradient: Tensor, info: Info) -> None:
        size = self.sampler.step_size
        if isinstance(self.sampler, langevin.ProjectedLangevin):
            # Clipping shortens all parts of the drift alike.
            kept = langevin.clip_factors(gradient, self.sampler.clip)
            self.stats.drift -= size * (kept * pull).double()
        else:
            # Preconditioned, the drift is no sum over its parts: all of it counts.
            assert info.drift_vectors is not None
            positions = state.particles.positions
            carried = (positions + info.drift_vectors) - positions
            self.stats.drift += carried.double()
        beta = langevin.as_schedule(self.sampler.inverse_temperature)(state.step)
        self.stats.noise += 2 * size / beta


# Below this ratio the alignment makes less than 1 % of the mean square of the moves.
DROWNED = 0.1
# Of an epoch and of all, unless it is said how often: a record goes through all
# held-out batches.
_RECORDS, _MOST_RECORDS = 4, 10

Pretrain = Callable[[nn.Module, Sequence[Any]], object]


@dataclass(frozen=True, eq=False)
class AlignmentResult:
    """The end of Phase A.

    Parameters
    ----------
    run
        Particles, history and why it ended.
    stats
        What drove the particles, added up.
    problem
        What was asked.
    norms
        The mean norm of the particles in the model, and after projection on the domain.
    """

    run: loop.Run
    stats: DriftStats
    problem: Problem
    norms: tuple[float, float]

    @property
    def account(self) -> DriftStats:
        """The former name of `stats`."""
        warnings.warn(
            "AlignmentResult.account is now AlignmentResult.stats.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.stats

    @property
    def history(self) -> list[dict[str, Any]]:
        """Records: alignment, held out, drift to noise, moved, energies."""
        return self.run.history

    @property
    def positions(self) -> Tensor:
        """Where the particles are, `(layers, heads, n_particles, dim)`."""
        return self.run.particles.positions

    @property
    def drift_to_noise(self) -> dict[str, list[float]]:
        """The cumulated ratio of every head, by layer."""
        ratios = self.stats.drift_to_noise().tolist()
        return dict(zip(self.problem.network.layers.names, ratios, strict=True))

    @property
    def drowned(self) -> bool:
        """Whether the noise drowned the drift in every head."""
        ratios = self.stats.drift_to_noise()
        return self.stats.noise > 0 and bool((ratios < DROWNED).all())

    def summary(self) -> str:
        """Tell in one paragraph what happened.

        Returns
        -------
        str
            Steps, alignment before and after, drift against noise, a warning if the
            noise drowned the drift.
        """
        problem, first, last = self.problem, self.history[0], self.history[-1]
        layers, heads, count, _ = self.positions.shape
        steps, reason = self.run.state.step, self.run.reason
        shape = f"{layers} x {heads} x {count} particles (layers, heads, particles)"
        judged = f"{problem.objective.score.label()}, by {problem.settings.level}"
        before, after = self.norms
        projected = not math.isclose(before, after, rel_tol=1e-3)
        if steps == 0 and not projected:
            return (
                f"Phase A left {shape} where they were: it was asked for no steps. "
                f"Their alignment ({judged}) is {first['alignment']:.4g}."
            )
        change = f"from {first['alignment']:.4g} to {last['alignment']:.4g} in training"
        if "held_out" in last:
            change += (
                f" and from {first['held_out']:.4g} to {last['held_out']:.4g} held out"
            )
        text = [
            f"Phase A moved {shape} for {steps} steps, "
            f"{steps / len(problem.training):.3g} epochs; it ended because "
            f"{reason.value if reason else 'it was interrupted'}.",
            f"The alignment ({judged}) went {change}.",
        ]
        if projected:
            text.append(
                f"Before the first step the domain had brought the mean norm of the "
                f"particles from {before:.3g} to {after:.3g}: compare with that, "
                "unlearned."
            )
        moved = root_mean_square(self.positions - self.stats.start)
        moved = moved.square().mean().sqrt()
        text.append(f"Particles ended {moved:.3g} from where they began.")
        return " ".join([*text, self.compare_drift()])

    def compare_drift(self) -> str:
        """Say how the drift compares with the noise, and whether it drowned.

        Returns
        -------
        str
            A sentence or two.
        """
        ratios = self.stats.drift_to_noise()
        if not self.stats.noise:
            return "There was no noise."
        low, high = (_share(float(ratio)) for ratio in (ratios.min(), ratios.max()))
        between = high if low == high else f"{low} to {high}"
        fact = f"The labels carried them {between} as far as their random walk did."
        if not self.drowned:
            return fact
        return (
            f"{fact} The drift is drowned by the noise, so nothing was learned that "
            "chance would not do: raise `inverse_temperature`, or take `drift='N'` and "
            "a larger `step_size`."
        )

    def save(self, path: str | Path) -> None:
        """Write the run to one file, from which `align(..., resume=path)` goes on.

        Parameters
        ----------
        path
            The file to make or replace. `load_run` reads it too.
        """
        extra = {
            "align.start": self.stats.start,
            "align.drift": self.stats.drift,
            "align.noise": torch.tensor(self.stats.noise, dtype=torch.float64),
            "align.seed": torch.tensor(self.problem.seed),
            "align.norms": torch.tensor(self.norms, dtype=torch.float64),
        }
        for name, value in self.problem.network.free.items():
            extra[f"align.free.{name}"] = value
        loop.save_run(self.run, path, extra=extra)


def align(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    settings: AlignmentSettings | None = None,
    held_out: Iterable[Any] | float | None = 0.2,
    evaluate: Evaluate | None = None,
    warm_up: Pretrain | None = None,
    seed: int = 0,
    resume: str | Path | loop.Run | None = None,
    callbacks: Sequence[loop.Callback] = (),
    progress: bool | None = None,
    ranks: Ranks | None = None,
    **changes: Any,
) -> AlignmentResult:
    """Move the particles of a model's attention towards its labels (Phase A).

    `w <- P(w - eta clip(N grad_k H) + sqrt(2 eta / beta) xi)`, `H = E + lambda W`, with
    `E` minus the alignment of the model's outputs on the next batch and `W` the
    repulsion inside each head. The model is evaluated as a function, without dropout;
    its particles (and what `also` names) are written back once, at the end.

    Parameters
    ----------
    model
        Any module with layers that have `particles` `(heads, n, dim)` and a
        `feature_map`, such as `KernelAttention`.
    batches
        A sequence of `(inputs, labels)`, `(inputs, key_mask, labels)` or mappings with
        "labels"; other iterables are read once. Labels are classes `(batch,)` or
        `(batch, length)` (-100 for tokens without), real targets, or Gram matrices.
    settings
        What to do; None for the library's defaults, `PAPER` for the paper's.
    held_out
        Batches to watch, or the share of `batches` to keep back for that; None for no
        held-out alignment.
    evaluate
        A function of model, parameters by name and `Batch` that calls the model, or
        that gives a list: the outputs to align, of every layer. None for
        `torch.func.functional_call` with the batch's inputs.
    warm_up
        Called with the model and the training batches before anything else, such as
        `CrossEntropy(epochs=1)`; not when resuming.
    seed
        Of noise and order.
    resume
        A file written by `AlignmentResult.save`, or a run of `load_run`, to go on from.
    callbacks
        Called with the run at each record; True ends it.
    progress
        Show a bar; None shows it on a terminal only.
    ranks
        Processes that share the work, `Ranks.join()` under `torchrun`: each gives its
        own rows of every batch, scores and gradients are those of all rows, and all
        end with the same particles. None for this process alone.
    **changes
        Settings by name, such as `objective="within-class"`.

    Returns
    -------
    AlignmentResult
        Particles, history and a `summary()`.

    Examples
    --------
    >>> from coulomb.attention.ops.api import kernel_attention
    >>> class Tiny(nn.Module):
    ...     feature_map = "favor"
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.particles = nn.Parameter(torch.eye(2).unsqueeze(0))
    ...     def forward(self, x):
    ...         x, particles = x.unsqueeze(1), Particles(self.particles)
    ...         return kernel_attention(x, x, x, particles, "favor").squeeze(1)
    >>> first = torch.tensor([1.0, -1.0, 1.0, -1.0])  # of the first token: the label
    >>> other = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> tokens = torch.stack([first, 0 * first + 2, other, 0 * other], dim=-1)
    >>> batches = [(tokens.view(4, 2, 2), (first > 0).long())]
    >>> result = align(Tiny(), batches, held_out=None)
    >>> [round(result.history[i]["alignment"], 1) for i in (0, -1)]
    [0.3, 1.0]
    """
    chosen = (settings or AlignmentSettings()).changed(changes)
    problem = build_problem(
        model,
        batches,
        chosen,
        held_out=held_out,
        evaluate=evaluate,
        seed=seed,
        ranks=ranks or Ranks(),
    )
    network = problem.network
    if warm_up is not None and resume is None:
        warm_up(model, [problem.objective.batches[n] for n in problem.training])
        network.free.update(network.free_from(chosen.also))
    run, stats, norms = _init_run(problem, resume)
    rules: list[loop.AbstractStopRule] = [loop.Settled(chosen.tol, "max-displacement")]
    if chosen.patience is not None:
        if problem.held_out is None:
            raise ParameterError("`patience` needs `held_out`; got None.")
        rules.append(loop.HeldOut(patience=chosen.patience))
    of_epoch = -(-len(problem.training) // _RECORDS)
    run_settings = loop.RunSettings(
        problem.last_step,
        record_every=chosen.record_every
        or max(of_epoch, -(-problem.last_step // _MOST_RECORDS)),
        stop=rules,
        held_out=problem.held_out,
        callbacks=(stats.record, *callbacks),
        progress=progress,
    )
    sampler, energy = BatchedSampler(problem, stats), problem.energy(problem.objective)
    with in_mode(model, train=False):
        run = loop.run(run, sampler, energy, run_settings)
    network.layers.write(model, run.particles.positions)
    network.write_free()
    return AlignmentResult(run, stats, problem, norms)


def _init_run(
    problem: Problem, resume: str | Path | loop.Run | None
) -> tuple[loop.Run, DriftStats, tuple[float, float]]:
    """Start from the model's particles, or where a saved run was."""
    network = problem.network
    read = network.layers.read(network.model)
    if resume is None:
        inside = problem.settings.domain.project(read)
        generator = make_generator(problem.seed, MOVES)
        stats = DriftStats.of(inside)
        sampler = BatchedSampler(problem, stats)
        run = loop.init_run(sampler, Particles(inside), generator=generator)
        return run, stats, (_mean_norm(read), _mean_norm(inside))
    extra: dict[str, Tensor] = {}
    if isinstance(resume, loop.Run):
        run = resume
    else:
        run = loop.load_run(resume)
        extra, _ = read_archive(resume, complaint="is not a saved run")
    positions = run.particles.positions.to(read.device)
    if positions.shape != read.shape:
        raise ParameterError(
            f"`resume` must hold particles of shape {tuple(read.shape)}, as the model "
            f"has; got {tuple(positions.shape)}."
        )
    run.state = run.state._replace(particles=Particles(positions))
    stats = DriftStats.of(positions)
    norms = (_mean_norm(read), _mean_norm(positions))
    sizes = {"align.seed": (), "align.noise": (), "align.norms": (2,)}
    sizes |= dict.fromkeys(("align.start", "align.drift"), tuple(read.shape))
    for name, free in network.free.items():
        if f"align.free.{name}" not in extra:
            raise ParameterError(
                f"`resume` must hold {name!r}, which `also` moves; it does not. Write "
                "it with AlignmentResult.save."
            )
        sizes[f"align.free.{name}"] = tuple(free.shape)
    if extra.keys() & sizes.keys():
        for name, size in sizes.items():
            if name not in extra or tuple(extra[name].shape) != size:
                raise FileFormatError(
                    f"{resume} is a damaged run: {name!r} must have the shape {size}."
                )
        if int(extra["align.seed"]) != problem.seed:
            raise ParameterError(
                f"`seed` must be {int(extra['align.seed'])}, as in the run that is "
                f"resumed; got {problem.seed}."
            )
        stats = DriftStats(
            extra["align.start"].to(read.device),
            extra["align.drift"].to(read.device),
            float(extra["align.noise"]),
        )
        norms = (float(extra["align.norms"][0]), float(extra["align.norms"][1]))
    for name, free in network.free.items():
        network.free[name] = extra[f"align.free.{name}"].to(free)
    return run, stats, norms


def run_twin(
    problem: Problem,
    particles: Particles,
    steps: int,
    *,
    seed: int,
    shuffled_labels: bool = False,
) -> Particles:
    """Let particles move as in a run, but without labels.

    Or with training labels that are shuffled inside batches.
    """
    objective: AbstractObjective = NoAlignment()
    if shuffled_labels:
        network = replace(problem.network, free={})
        objective = replace(problem.objective, network=network, shuffle=seed)
    sampler = BatchedSampler(problem, DriftStats.of(particles.positions))
    begun = loop.init_run(sampler, particles, generator=make_generator(seed, MOVES))
    settings = loop.RunSettings(steps, record_every=max(1, steps))
    return loop.run(begun, sampler, problem.energy(objective), settings).particles


def _mean_norm(positions: Tensor) -> float:
    return float(positions.norm(dim=-1).mean())


def _share(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio >= 1 else f"{100 * ratio:.2g} %"


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
        with torch.random.fork_rng(), in_mode(model, train=True):
            source = make_generator(self.seed, PRETRAIN)
            torch.default_generator.set_state(source.get_state())
            for step in range(self.epochs * len(numbers)):
                number = batch_of_step(step, numbers, self.seed)
                batch = as_batch(batches[number])
                logits = self.logits(model, batch)
                labels = batch.labels.flatten()  # IGNORED ones do not count
                loss = functional.cross_entropy(logits.flatten(0, -2), labels)
                optimiser.zero_grad()
                torch.autograd.backward(loss, inputs=moving)
                optimiser.step()
                losses.append(float(loss.detach()))
            optimiser.zero_grad()
        size = max(1, len(numbers))
        return [sum(losses[i : i + size]) / size for i in range(0, len(losses), size)]
