"""Phase A: take the particles out of a model, let labels move them, put them back.

The dynamics is the estimators': the same Hamiltonian, interactions, domains, Langevin
steps and run loop. Only the energy differs: it asks the model for its outputs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coulomb._support.archive import read_archive
from coulomb._support.errors import ParameterError
from coulomb._support.streams import make_generator
from coulomb.attention.align.model_as_function import Evaluate, evaluating
from coulomb.attention.align.problem import AlignmentSettings, Problem, set_up
from coulomb.attention.align.sampler import MOVES, Account, Recorder
from coulomb.dynamics import loop
from coulomb.dynamics.loop import Callback, Run, RunSettings, load_run, save_run
from coulomb.dynamics.stopping import AbstractStopRule, HeldOut, Settled
from coulomb.features import Particles

# Below this ratio the alignment makes less than 1 % of the mean square of the moves.
DROWNED = 0.1
# Of an epoch and of all, unless it is said how often: a record goes through all
# held-out batches.
_RECORDS, _MOST_RECORDS = 4, 10

WarmUp = Callable[[nn.Module, Sequence[Any]], object]


@dataclass(frozen=True, eq=False)
class AlignmentResult:
    """The end of Phase A.

    Parameters
    ----------
    run
        Particles, history and why it ended.
    account
        What drove the particles, added up.
    problem
        What was asked.
    norms
        The mean norm of the particles in the model, and after projection on the domain.
    """

    run: Run
    account: Account
    problem: Problem
    norms: tuple[float, float]

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
        ratios = self.account.drift_to_noise().tolist()
        return dict(zip(self.problem.network.layers.names, ratios, strict=True))

    @property
    def drowned(self) -> bool:
        """Whether the noise drowned the drift in every head."""
        ratios = self.account.drift_to_noise()
        return self.account.noise > 0 and bool((ratios < DROWNED).all())

    def summary(self) -> str:
        """Tell in one paragraph what happened.

        Returns
        -------
        str
            Steps, alignment before and after, drift against noise, a warning if the
            noise drowned the drift.
        """
        return describe(self)

    def save(self, path: str | Path) -> None:
        """Write the run to one file, from which `align(..., resume=path)` goes on.

        Parameters
        ----------
        path
            The file to make or replace. `load_run` reads it too.
        """
        extra = {
            "align.start": self.account.start,
            "align.drift": self.account.drift,
            "align.noise": torch.tensor(self.account.noise, dtype=torch.float64),
            "align.seed": torch.tensor(self.problem.seed),
            "align.norms": torch.tensor(self.norms, dtype=torch.float64),
        }
        for name, value in self.problem.network.free.items():
            extra[f"align.free.{name}"] = value
        save_run(self.run, path, extra=extra)


def align(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    settings: AlignmentSettings | None = None,
    held_out: Iterable[Any] | float | None = 0.2,
    evaluate: Evaluate | None = None,
    warm_up: WarmUp | None = None,
    seed: int = 0,
    resume: str | Path | Run | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
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
        A function of model, parameters by name and `Batch` that calls the model; None
        for `torch.func.functional_call` with the batch's inputs.
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
    options: dict[str, Any] = {"held_out": held_out, "evaluate": evaluate, "seed": seed}
    if warm_up is not None and resume is None:
        before = set_up(model, batches, chosen, **options)
        batches = before.objective.batches
        warm_up(model, [batches[number] for number in before.training])
    problem = set_up(model, batches, chosen, **options)
    run, account, norms = _begin(problem, resume)
    rules: list[AbstractStopRule] = [Recorder(account)]
    rules.append(Settled(chosen.tol, "max-displacement"))
    if chosen.patience is not None:
        if problem.held_out is None:
            raise ParameterError("`patience` needs `held_out`; got None.")
        rules.append(HeldOut(patience=chosen.patience))
    run_settings = RunSettings(
        problem.last_step,
        record_every=chosen.record_every or _interval(problem),
        stop=rules,
        held_out=problem.held_out,
        callbacks=callbacks,
        progress=progress,
    )
    with evaluating(model):
        run = loop.run(
            run,
            problem.sampler(account),
            problem.energy(problem.objective),
            run_settings,
        )
    problem.network.layers.write(model, run.particles.positions)
    problem.network.write_free()
    return AlignmentResult(run, account, problem, norms)


def _interval(problem: Problem) -> int:
    """Say how many steps lie between two records."""
    of_epoch = -(-len(problem.training) // _RECORDS)
    return max(of_epoch, -(-problem.last_step // _MOST_RECORDS))


def _begin(
    problem: Problem, resume: str | Path | Run | None
) -> tuple[Run, Account, tuple[float, float]]:
    """Start from the model's particles, or where a saved run was."""
    network = problem.network
    read = network.layers.read(network.model)
    if resume is None:
        inside = problem.settings.domain.project(read)
        generator = make_generator(problem.seed, MOVES)
        account = Account.of(inside)
        sampler = problem.sampler(account)
        run = loop.init_run(sampler, Particles(inside), generator=generator)
        return run, account, (_mean_norm(read), _mean_norm(inside))
    run, extra = (resume, {}) if isinstance(resume, Run) else _load(resume)
    positions = run.particles.positions.to(read.device)
    if positions.shape != read.shape:
        raise ParameterError(
            f"`resume` must hold particles of shape {tuple(read.shape)}, as the model "
            f"has; got {tuple(positions.shape)}."
        )
    run.state = run.state._replace(particles=Particles(positions))
    account = Account.of(positions)
    norms = (_mean_norm(read), _mean_norm(positions))
    if "align.seed" in extra:
        if int(extra["align.seed"]) != problem.seed:
            raise ParameterError(
                f"`seed` must be {int(extra['align.seed'])}, as in the run that is "
                f"resumed; got {problem.seed}."
            )
        account = Account(
            extra["align.start"].to(read.device),
            extra["align.drift"].to(read.device),
            float(extra["align.noise"]),
            positions,
        )
        norms = (float(extra["align.norms"][0]), float(extra["align.norms"][1]))
    for name in network.free:
        if f"align.free.{name}" not in extra:
            raise ParameterError(
                f"`resume` must hold {name!r}, which `also` moves; it does not. Write "
                "it with AlignmentResult.save."
            )
        network.free[name] = extra[f"align.free.{name}"].to(network.free[name])
    return run, account, norms


def _load(path: str | Path) -> tuple[Run, dict[str, Tensor]]:
    return load_run(path), read_archive(path, complaint="is not a saved run")[0]


def _mean_norm(positions: Tensor) -> float:
    return float(positions.norm(dim=-1).mean())


def describe(result: AlignmentResult) -> str:
    """Write the paragraph of `AlignmentResult.summary`."""
    problem, history = result.problem, result.history
    layers, heads, n_particles, _ = result.positions.shape
    steps, reason = result.run.state.step, result.run.reason
    score, level = problem.objective.score, problem.settings.level
    shape = f"{layers} x {heads} x {n_particles} particles (layers, heads, particles)"
    first, last = history[0], history[-1]
    before, after = result.norms
    projected = not math.isclose(before, after, rel_tol=1e-3)
    if steps == 0 and not projected:
        return (
            f"Phase A left {shape} where they were: it was asked for no steps. Their "
            f"alignment ({score.label()}, by {level}) is {first['alignment']:.4g}."
        )
    text = [
        f"Phase A moved {shape} for {steps} steps, "
        f"{steps / len(problem.training):.3g} epochs; it ended because "
        f"{reason.value if reason else 'it was interrupted'}."
    ]
    change = f"from {first['alignment']:.4g} to {last['alignment']:.4g} in training"
    if "held_out" in last:
        change += (
            f" and from {first['held_out']:.4g} to {last['held_out']:.4g} held out"
        )
    text.append(f"The alignment ({score.label()}, by {level}) went {change}.")
    if projected:
        text.append(
            f"Before the first step the domain had brought the mean norm of the "
            f"particles from {before:.3g} to {after:.3g}: compare with that, unlearned."
        )
    moved = float(result.account.moved().square().mean().sqrt())
    text.append(f"Particles ended {moved:.3g} from where they began.")
    text.append(drift_sentence(result))
    return " ".join(text)


def drift_sentence(result: AlignmentResult) -> str:
    """Say how the drift compares with the noise, and whether it drowned."""
    ratios = result.account.drift_to_noise()
    if not result.account.noise:
        return "There was no noise."
    low, high = (_share(float(ratio)) for ratio in (ratios.min(), ratios.max()))
    between = high if low == high else f"{low} to {high}"
    fact = f"The labels carried them {between} as far as their random walk did."
    if not result.drowned:
        return fact
    return (
        f"{fact} The drift is drowned by the noise, so nothing was learned that chance "
        "would not do: raise `inverse_temperature`, or take `drift='N'` and a larger "
        "`step_size`."
    )


def _share(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio >= 1 else f"{100 * ratio:.2g} %"
