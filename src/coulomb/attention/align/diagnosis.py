"""Did Phase A learn? Controls that tell alignment from noise and from projection.

A run is compared with twins that feel no labels, its gain with the gain on shuffled
labels, its gradient with theirs. Nothing here changes the model.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coulomb._support.archive import plain
from coulomb._support.checks import check_count, check_real, make_generator
from coulomb._support.errors import ParameterError
from coulomb._support.progress import progress_bar
from coulomb._support.stats import permutation_p_value, prediction_p_value
from coulomb.attention.align.problem import SHUFFLES, TWINS, ModelAlignment
from coulomb.attention.align.run import AlignmentResult, root_mean_square, run_twin
from coulomb.attention.align.scores import AbstractScore, Centred, Rows, as_score
from coulomb.attention.align.starts import ChoiceTest, MatchTest
from coulomb.attention.layers.base import in_mode
from coulomb.features import Particles

# An objective whose gradient keeps this much of its direction does not see the labels.
BLIND = 0.9
# What is due to the labels must be more than this share of a gain.
MOST = 0.5


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What the controls found. Groups are `(layers, heads)`.

    Parameters
    ----------
    layers
        Names of the layers whose particles moved.
    steps
        How many steps the run made.
    drift_to_noise
        How far labels carried particles, over their random walk, per group.
    moved, moved_by_noise
        How far particles, and those of the twin with the same noise and no labels, are
        from their start, per group.
    apart
        How far the two are from each other, per group: what the labels did.
    training_gain
        Alignment on the watched training batches, after minus before.
    before, after
        Alignment on held-out batches.
    twins
        The same after noise alone, for other seeds.
    label_twins
        The same after runs with shuffled training labels; empty if there were none.
    shuffled_gains
        After minus before with held-out labels shuffled.
    cosines
        Between the first gradients with true and with shuffled labels, per group.
    p_value
        Of `after` being one of the twins.
    p_shuffled
        Of the gain being one of those on shuffled labels.
    p_labels
        Of `after` being one of the label twins; None without them.
    learned
        Whether all are below the level asked for, the gain is positive and, if there
        were label twins, most of it is due to the labels.
    drowned
        Whether noise drowned the drift in every group.
    drift
        The drift and the noise in words.
    judged_by
        The alignment that was compared.
    chosen
        What the labels chose before the first step, and its control; None if they were
        not asked.
    """

    layers: tuple[str, ...]
    steps: int
    drift_to_noise: Tensor
    moved: Tensor
    moved_by_noise: Tensor
    apart: Tensor
    training_gain: float
    before: float
    after: float
    twins: tuple[float, ...]
    label_twins: tuple[float, ...]
    shuffled_gains: tuple[float, ...]
    cosines: Tensor
    p_value: float
    p_shuffled: float
    p_labels: float | None
    learned: bool
    drowned: bool
    drift: str
    judged_by: str
    chosen: ChoiceTest | MatchTest | None = None

    @property
    def gain(self) -> float:
        """Alignment on held-out batches, after minus before."""
        return self.after - self.before

    @property
    def label_share(self) -> float | None:
        """The share of the gain over noise that shuffled training labels do not give.

        None without label twins.
        """
        if not self.label_twins:
            return None
        gain = self.after - sum(self.twins) / len(self.twins)
        if gain <= 0:
            return 0.0
        return (self.after - sum(self.label_twins) / len(self.label_twins)) / gain

    @property
    def verdict(self) -> str:
        """One sentence: learned or not, and why."""
        if self.chosen is None:
            return self._verdict_on_steps()
        told = "learned" if self.learned else "did not learn"
        verdict = f"Phase A {told}: {self.chosen.sentence()}."
        return f"{verdict} {self._verdict_on_steps()}" if self.steps else verdict

    def _verdict_on_steps(self) -> str:
        chance = sum(self.twins) / len(self.twins)
        alone = f"by noise alone {chance:.4g} (p = {self.p_value:.2g})"
        if max(self.twins) == min(self.twins):
            alone = f"without labels {chance:.4g}"  # and without noise: no test
        facts = (
            f"held-out alignment ({self.judged_by}) {self.before:.4g} -> "
            f"{self.after:.4g}, {alone}, shuffled labels p = {self.p_shuffled:.2g}"
        )
        if self.p_labels is not None:
            theirs = sum(self.label_twins) / len(self.label_twins)
            facts += (
                f", trained on shuffled labels {theirs:.4g} (p = {self.p_labels:.2g})"
            )
        if not self.learned:
            why = " and ".join(self._reasons())
            return f"Phase A did not learn: {why}; {facts}."
        if self.p_labels is None and float(self.cosines.mean()) > BLIND:
            return (
                f"Phase A learned, but perhaps not from the labels, which its first "
                f"gradient hardly saw; `n_label_twins` would tell: {facts}."
            )
        return f"Phase A learned: {facts}."

    def _reasons(self) -> list[str]:
        if not self.steps:
            return ["it made no steps"]
        reasons = []
        cosine = float(self.cosines.mean())
        if self.drowned:
            most = 100 * float(self.drift_to_noise.max())
            reasons.append(
                f"its drift is drowned by its noise (at most {most:.2g} % of the "
                "random walk)"
            )
        if cosine > BLIND:
            reasons.append(
                "its objective hardly sees the labels (gradient cosine "
                f"{cosine:.3f} between true and shuffled ones)"
            )
        share = self.label_share
        if share is not None and share <= MOST and self.gain > 0:
            reasons.append("it gains most of it on labels without meaning too")
        if reasons:
            return reasons
        if self.after > max(self.before, *self.twins):
            return [f"its gain cannot be told from that of {self._nearest()}"]
        if self.training_gain > 0:
            return ["its gain in training did not carry over to other data"]
        return ["no alignment was gained"]

    def _nearest(self) -> str:
        """Name the control with the largest p-value."""
        tests = {
            "noise alone": self.p_value,
            "shuffled held-out labels": self.p_shuffled,
            "runs on shuffled labels": self.p_labels or 0.0,
        }
        return max(tests, key=lambda name: tests[name])

    def summary(self) -> str:
        """Tell in one paragraph what the controls found.

        Returns
        -------
        str
            The verdict first.
        """

        def mean(groups: Tensor) -> float:
            return float(groups.square().mean().sqrt())

        return (
            f"{self.verdict} {self.drift} Particles ended {mean(self.moved):.3g} from "
            "where they began; noise alone brought them "
            f"{mean(self.moved_by_noise):.3g} away, and the labels "
            f"{mean(self.apart):.3g} from there. With shuffled labels the gradient has "
            f"a cosine of {float(self.cosines.mean()):.3f} with the true one."
        )

    def record(self) -> dict[str, Any]:
        """Give everything as plain data, for a file.

        Returns
        -------
        dict
            Numbers, lists and the verdict; infinite numbers are None.
        """
        told = {"gain": self.gain, "label_share": self.label_share}
        found: dict[str, Any] = plain(vars(self) | told | {"verdict": self.verdict})
        return found


def diagnose(
    result: AlignmentResult,
    *,
    objective: str | AbstractScore | None = None,
    n_twins: int = 9,
    n_label_twins: int = 0,
    n_shuffles: int = 199,
    level: float = 0.01,
    progress: bool | None = False,
) -> Diagnosis:
    """Compare a run with its controls.

    The twins start where the run started and feel repulsion and noise, not labels. If
    labels did nothing, the run is one more twin with another seed, so that its held-out
    alignment lies in the prediction interval of theirs,
    `mean + t sd sqrt(1 + 1/n_twins)`. Its gain must also exceed the gain with held-out
    labels permuted inside batches. The model must be as `align` left it.

    Parameters
    ----------
    result
        What `align` gave, with held-out batches.
    objective
        The alignment to judge by, a name or a score; None for the run's own if it is
        normalised, else the centred one: larger outputs alone are not learning.
    n_twins
        Noise-only runs with other seeds, at least 2. They do not evaluate the model
        while they move, so they are cheap.
    n_label_twins
        Runs with shuffled training labels, none or at least 2; each costs as much as
        the run. They tell gains that come from labels from those any labels give.
    n_shuffles
        Permutations of the held-out labels; their p-value is at least
        `1 / (n_shuffles + 1)`.
    level
        The error allowed in saying "learned", for each of the tests.
    progress
        Show a bar; None shows it on a terminal only.

    Returns
    -------
    Diagnosis
        Numbers, a `verdict` and a `summary()`.
    """
    check_count("n_twins", n_twins, at_least=2)
    check_count("n_label_twins", n_label_twins, at_least=2 if n_label_twins else 0)
    check_count("n_shuffles", n_shuffles)
    check_real("level", level, above=0, below=1)
    problem, held_out = result.problem, result.problem.held_out
    if held_out is None:
        raise ParameterError(
            "`result` must come from `align` with held-out batches; it has none."
        )
    if objective is None:
        objective = held_out.score if held_out.score.normalised else Centred()
    held_out = replace(held_out, score=as_score(objective))
    watched = replace(problem.objective, score=held_out.score)
    begin, end = Particles(result.stats.start), result.run.particles
    steps = result.run.state.step
    scores: dict[bool, list[float]] = {False: [], True: []}
    with (
        in_mode(problem.network.model, train=False),
        torch.no_grad(),
        progress_bar(
            "controls", n_twins + n_label_twins + 1, visible=progress
        ) as advance,
    ):
        before, after, gains = shuffled_gains(held_out, begin, end, n_shuffles)
        own = run_twin(problem, begin, steps, seed=problem.seed)
        advance()
        for mixed, count in ((False, n_twins), (True, n_label_twins)):
            for number in range(count):
                seed = make_generator(problem.seed, TWINS, number).initial_seed()
                twin = run_twin(problem, begin, steps, seed=seed, shuffled_labels=mixed)
                scores[mixed].append(-float(held_out.energy(twin)))
                advance()
        training_gain = float(watched.energy(begin) - watched.energy(end))
        cosines = label_cosines(problem.objective, begin)
    twins, label_twins = tuple(scores[False]), tuple(scores[True])
    p_value = prediction_p_value(after, twins)
    p_labels = prediction_p_value(after, label_twins) if label_twins else None
    p_shuffled = permutation_p_value(after - before, gains)
    found = Diagnosis(
        layers=problem.network.layers.names,
        steps=steps,
        drift_to_noise=result.stats.drift_to_noise(),
        moved=root_mean_square(end.positions - begin.positions),
        moved_by_noise=root_mean_square(own.positions - begin.positions),
        apart=root_mean_square(end.positions - own.positions),
        training_gain=training_gain,
        before=before,
        after=after,
        twins=twins,
        label_twins=label_twins,
        shuffled_gains=tuple(gains),
        cosines=cosines,
        p_value=p_value,
        p_shuffled=p_shuffled,
        p_labels=p_labels,
        learned=max(p_value, p_shuffled, p_labels or 0.0) < level and after > before,
        drowned=result.drowned,
        drift=result.compare_drift(),
        judged_by=held_out.score.label(),
    )
    share = found.label_share
    return found if share is None or share > MOST else replace(found, learned=False)


def label_cosines(
    objective: ModelAlignment, particles: Particles, *, n_shuffles: int = 3
) -> Tensor:
    """Compare gradients with true and with shuffled labels."""
    true = objective.field(particles).gradient.flatten(-2)
    cosines = []
    for number in range(n_shuffles):
        mixed = replace(objective, shuffle=number).field(particles).gradient
        cosines.append(torch.cosine_similarity(true, mixed.flatten(-2), dim=-1))
    return torch.stack(cosines).mean(dim=0)


def shuffled_gains(
    objective: ModelAlignment, before: Particles, after: Particles, n_shuffles: int
) -> tuple[float, float, list[float]]:
    """Score both ends of a run with true labels, and its gain with each permutation."""
    numbers = objective.numbers
    ends = [[objective.rows(end, n) for n in numbers] for end in (before, after)]

    def score(rows: list[list[Rows]], shuffle: int | None) -> float:
        total = 0.0
        for number, picked in zip(numbers, rows, strict=True):
            if shuffle is not None:
                generator = make_generator(shuffle, SHUFFLES, number)
                picked = objective.shuffle_rows(picked, generator)
            total += float(objective.score_rows(picked))
        return total / len(numbers)

    early, late = (score(rows, None) for rows in ends)
    gains = [score(ends[1], n) - score(ends[0], n) for n in range(n_shuffles)]
    return early, late, gains


def with_choice(
    found: Diagnosis, chosen: ChoiceTest | MatchTest, level: float = 0.01
) -> Diagnosis:
    """Add what the labels chose before the first step."""
    learned = found.learned or chosen.p_value < level
    return replace(found, chosen=chosen, learned=learned)
