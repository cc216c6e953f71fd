"""Learning particles from the teacher: layer by layer, then all of them together.

Particles start at landmarks of the keys. Features `softmax_m(-|k - c_m|^2 / (2 h))` are
soft assignments of a key to landmarks `c_m`, and a query that weighs landmarks by
`exp(q . c_m / sqrt(d))` attends to keys through them. The landmarks are k-means centres
in the metric of the scores `q . k / sqrt(d)`, so that no feature is spent on directions
no query looks at. Then the particles of a layer descend on how far its rows of
attention are from the teacher's, and all layers together on how far hidden states are.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from coulomb._support.checks import Registry, check_count, check_member, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.ranks import ALONE, Ranks
from coulomb.dynamics.initial import Orthogonal
from coulomb.dynamics.langevin import AdamLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import (
    DEFAULT_MAP,
    SOFTMAX_KERNEL_MAP,
    AbstractFeatureMap,
    Particles,
)
from coulomb.interactions import Riesz
from coulomb.linearise.heads import (
    HeadParticles,
    LinearisedHeads,
    as_positive_map,
    drawn,
    for_both,
    in_band,
    mean_key_particle,
    tilted,
    untilted,
)
from coulomb.linearise.teacher import Batch, Recording, Rows, Stack
from coulomb.objectives import AbstractObjective, Field

_SAMPLE = 3000  # tokens that k-means looks at
_K_MEANS_ROUNDS = 8
_HELD_ROWS = 32
_HELD_BATCHES = 4
_WARM_UP = 10
_REPULSION = Riesz(0.0)

# The width h of an assignment, in units of the variance of a coordinate of the keys.
_WIDTH = 2.0

# Eigenvalues of the metric are at least this share of the largest.
_FLOOR = 1e-6

# Products of features below this count as this: what is divided by them, times
# features and summed, stays in the range.
_LEAST = 1e-30


@dataclass(frozen=True)
class LineariseSettings:
    """How particles are learned; the defaults were chosen on validation texts.

    Parameters
    ----------
    n_features
        Particles of each head.
    feature_map
        The name of a positive map.
    objective
        What particles minimise: "kl" of attention rows, "mse" of outputs, "alignment"
        of rows.
    start
        "landmarks" of the keys (for `softmaxfeat`), "random", or "auto" for landmarks
        where the map has them.
    window
        Tokens at most so far from a query are compared exactly, which costs what some
        features cost (for `softmaxfeat`); 0 for none.
    exact_length
        Texts of at most so many tokens attend by softmax, which is faster there; their
        particles are learned all the same.
    shared
        Whether queries and keys have the same particles.
    steps, step_size
        Steps of each layer, and the length of the first ones; it falls to zero.
    inverse_temperature
        `beta` of the noise; infinity for none.
    repulsion
        `lambda`, the strength of the log repulsion inside a head.
    check_every, patience
        Steps between looks at held-out texts; looks without a gain that end a layer.
    distil_steps, distil_step_size
        Steps of all particles together, on the hidden states of the whole encoder; 0
        steps for none.
    pooling
        What distillation compares beside hidden states: the "mean" of the real tokens,
        the "first" token, or None.
    max_tokens
        Texts are drawn until they have about so many tokens: the memory that is needed.
    max_length
        Tokens of the longest text; None for as many as the model has positions, at most
        512. Learned positions are repeated where there are fewer.
    batch_tokens, rows
        Tokens of a batch, and queries of each text that are compared in a step.
    long_share
        The least share of texts over a quarter of `max_length`; short ones are joined.
    int8
        Whether linear layers of the result multiply eight-bit integers on the CPU.
    """

    n_features: int = 64
    feature_map: str = DEFAULT_MAP
    objective: str = "kl"
    start: str = "auto"
    window: int = 8
    exact_length: int = 256
    shared: bool = False
    steps: int = 200
    step_size: float = 0.02
    inverse_temperature: float = math.inf
    repulsion: float = 0.0
    check_every: int = 25
    patience: int = 3
    distil_steps: int = 80
    distil_step_size: float = 0.003
    pooling: str | None = "mean"
    max_tokens: int = 30_000
    max_length: int | None = None
    batch_tokens: int = 768
    rows: int = 48
    long_share: float = 0.5
    int8: bool = False

    def __post_init__(self) -> None:
        counts = ("n_features", "check_every", "patience", "max_tokens", "rows")
        for name in (*counts, "batch_tokens"):
            check_count(name, getattr(self, name))
        for name in ("steps", "distil_steps", "window", "exact_length"):
            check_count(name, getattr(self, name), at_least=0)
        if self.max_length is not None:
            check_count("max_length", self.max_length, at_least=2)
        for name in ("step_size", "distil_step_size"):
            check_real(name, getattr(self, name), above=0)
        beta = self.inverse_temperature
        check_real("inverse_temperature", beta, above=0, infinite=True)
        check_real("repulsion", self.repulsion, at_least=0)
        check_real("long_share", self.long_share, at_least=0, at_most=1)
        as_positive_map(self.feature_map)
        check_member("objective", self.objective, list(imitations))
        check_member("start", self.start, ("auto", "landmarks", "random"))
        if self.pooling is not None:
            check_member("pooling", self.pooling, ("mean", "first"))
        if self.start == "landmarks" and not self.from_landmarks:
            raise ParameterError(
                "`start` must be 'random' or 'auto' for the map "
                f"{self.feature_map!r}; got 'landmarks', which softmaxfeat has."
            )

    @property
    def from_landmarks(self) -> bool:
        """Whether particles start at landmarks."""
        return self.start != "random" and self._softmax_over_features

    @property
    def near(self) -> int:
        """The window, where the map has the scale of softmax."""
        return self.window if self._softmax_over_features else 0

    @property
    def _softmax_over_features(self) -> bool:
        return as_positive_map(self.feature_map).softmax_over_features


@dataclass(frozen=True, eq=False)
class AbstractImitation(AbstractObjective):
    """A comparison of the student's attention with the teacher's."""

    batches: Sequence[Rows]
    start: HeadParticles  # positions are given with every call

    @abstractmethod
    def compare(self, rows: Rows, particles: HeadParticles) -> Tensor:
        """Evaluate the energy of one batch."""

    def energy(self, particles: Particles) -> Tensor:
        heads = self.head_particles(particles.positions)
        parts = [self.compare(rows, heads) for rows in self.batches]
        return torch.stack(parts).mean(dim=0)

    @classmethod
    def measure(cls, batches: Sequence[Rows], particles: HeadParticles) -> Tensor:
        """Evaluate the energy of given particles."""
        particles = particles.to(batches[0].q)
        with torch.no_grad():
            return cls(batches, particles).energy(Particles(particles.positions))

    def head_particles(self, positions: Tensor) -> HeadParticles:
        """Take positions with half the columns for queries and keys alike."""
        if positions.shape[-1] == self.start.tilt.shape[-1] + 1:
            positions = torch.cat([positions, positions], dim=-1)
        return self.start._replace(positions=positions)


imitations: Registry[AbstractImitation] = Registry("objective")


@imitations.add("kl")
@dataclass(frozen=True, eq=False)
class RowDivergence(AbstractImitation):
    """`KL(p_i || s_i)`, the mean over queries of the divergence of their rows.

    Examples
    --------
    >>> x, real = torch.zeros(1, 1, 3, 2), torch.ones(1, 3, dtype=torch.bool)
    >>> rows = Rows(x, x, x, real, real)
    >>> particles = HeadParticles(
    ...     torch.ones(1, 4, 6), torch.zeros(1, 2), as_positive_map(DEFAULT_MAP)
    ... )
    >>> RowDivergence.measure([rows], particles)
    tensor([0.])
    """

    def compare(self, rows: Rows, particles: HeadParticles) -> Tensor:
        teacher = rows.softmax()
        tiny = torch.finfo(teacher.dtype).tiny
        student = particles.rows(*rows.operands).clamp_min(tiny)
        entropy = torch.special.entr(teacher).sum(dim=-1)
        return rows.mean(-(teacher * student.log()).sum(dim=-1) - entropy)

    def field(self, particles: Particles) -> Field:
        if not self.start.feature_map.softmax_over_features:
            return super().field(particles)
        positions = particles.positions
        with torch.no_grad():
            heads = self.head_particles(positions)
            parts = [divergence_field(rows, heads) for rows in self.batches]
            energy, gradient = (
                torch.stack(part).mean(dim=0) for part in zip(*parts, strict=True)
            )
            if gradient.shape != positions.shape:  # queries and keys share particles
                gradient = torch.stack(gradient.chunk(2, dim=-1)).sum(dim=0)
        felt = energy.unsqueeze(-1).expand(positions.shape[:-1])
        return Field(felt, particles.n_particles * gradient)


@imitations.add("mse")
@dataclass(frozen=True, eq=False)
class OutputError(AbstractImitation):
    """`|(s_i - p_i) v|^2 / mean |p_i v|^2`, relative squared error of the output."""

    def compare(self, rows: Rows, particles: HeadParticles) -> Tensor:
        teacher = rows.softmax()
        wrong = (particles.rows(*rows.operands) - teacher) @ rows.v
        size = rows.mean((teacher @ rows.v).square().sum(dim=-1))
        return rows.mean(wrong.square().sum(dim=-1)) / size.clamp_min(1e-12)


@imitations.add("alignment")
@dataclass(frozen=True, eq=False)
class RowAlignment(AbstractImitation):
    """`1 - <p_i, s_i> / (|p_i| |s_i|)`, the alignment of normalised rows.

    Kernel-target alignment with each row a problem of its own: no row outweighs the
    others, whatever the length of its query.
    """

    def compare(self, rows: Rows, particles: HeadParticles) -> Tensor:
        student = particles.rows(*rows.operands)
        cosine = torch.cosine_similarity(rows.softmax(), student, dim=-1, eps=1e-12)
        return rows.mean(1 - cosine)


def divergence_field(rows: Rows, particles: HeadParticles) -> tuple[Tensor, Tensor]:
    """Evaluate `RowDivergence` of `softmaxfeat` and its gradient, both written out.

    With `R_ij = f(q_i) . g(k_j)`, the score `s_ij` and `z_ij = s_ij` in the band, or
    `log R_ij + t . k_j + c_i` outside of it,

    `KL_i = sum_j p_ij (s_ij - z_ij) - lse_j s_ij + lse_j z_ij`, so that
    `dKL_i / dz_ij = softmax_j(z_ij) - p_ij`, and outside of the band
    `dKL_i / df(q_i) = sum_j (dKL_i / dz_ij) g(k_j) / R_ij`,

    and alike for keys. Both `f` and `g` are softmaxes: the correction of the first
    vanishes with the gradient of `c_i`, their log-sum-exp, and that of the second is
    the gradient of `t . k_j`. Autograd goes over the rows some ten times.
    """
    temperature = particles.feature_map.temperature
    q, k = (x.transpose(0, 1) for x in (rows.q, rows.k))  # (heads, batch, n, dim)
    for_queries, for_keys = (particles.positions / temperature).chunk(2, dim=-1)
    f, scale = _softmax_features(q, for_queries)
    g, _ = _softmax_features(k, for_keys)
    exponent = tilted(rows.k, particles.key_tilt).transpose(0, 1)
    products = torch.bmm(f, g.transpose(1, 2)).clamp_(min=_LEAST)
    log_student = products.log().view(*q.shape[:3], -1).add_(exponent.unsqueeze(2))
    scaled = (q * q.shape[-1] ** -0.5).flatten(0, 1)
    scores = torch.bmm(scaled, k.flatten(0, 1).transpose(1, 2)).view_as(log_student)
    if rows.bias is not None:
        scores += rows.bias.transpose(0, 1)
    near = None
    if particles.window:
        n, m = log_student.shape[2:]
        near = in_band(rows.places, n, m, particles.window, q.device)
        log_student += scale.view(*q.shape[:3], 1)
        log_student = torch.where(near, scores, log_student, out=log_student)
    if not bool(rows.key_mask.all()):
        hidden, low = ~rows.key_mask[:, None, :], torch.finfo(q.dtype).min
        for logarithms in (scores, log_student):
            logarithms.masked_fill_(hidden, low)
    share = rows.query_mask.to(q.dtype)
    share = (share / share.sum().clamp_min(1)).unsqueeze(-1)  # (batch, n, 1)

    change = log_student.logsumexp(dim=-1) - scores.logsumexp(dim=-1)
    teacher, student = scores.softmax(dim=-1), log_student.softmax(dim=-1)
    value = scores.sub_(log_student).mul_(teacher).sum(dim=-1).add_(change)
    value = (value * share.squeeze(-1)).flatten(1).sum(dim=-1)

    pull = student.sub_(teacher).mul_(share)
    if near is not None:
        pull.masked_fill_(near, 0)
    ratio = pull.flatten(0, 1).div_(products)
    grad_q = torch.bmm(ratio, g).mul_(f)
    grad_k = torch.bmm(ratio.transpose(1, 2), f).mul_(g)
    grad_exponent = grad_k.sum(dim=-1, keepdim=True)
    grad_k.addcmul_(g, grad_exponent, value=-1)

    gradient = torch.cat([_gradient(q, grad_q), _gradient(k, grad_k)], dim=-1)
    gradient /= temperature
    half = gradient.shape[-1] // 2
    # (heads, 1, dim)
    moved = _by_head(grad_exponent, k).transpose(1, 2) @ _by_head(k, k)
    gradient[..., half:-1] += moved / gradient.shape[-2]
    return value, gradient


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(len(like), -1, x.shape[-1])


def _softmax_features(x: Tensor, particles: Tensor) -> tuple[Tensor, Tensor]:
    dim = x.shape[-1]
    columns = particles[..., :dim].transpose(1, 2)
    logits = torch.baddbmm(particles[..., dim].unsqueeze(1), _by_head(x, x), columns)
    logits = logits.view(-1, x.shape[2], particles.shape[1])
    scale = logits.logsumexp(dim=-1, keepdim=True)
    return torch.softmax(logits, dim=-1, out=logits), scale


def _gradient(x: Tensor, grad: Tensor) -> Tensor:
    grad, x = _by_head(grad, x), _by_head(x, x)
    rows = torch.bmm(grad.transpose(1, 2), x)
    return torch.cat([rows, grad.sum(dim=1).unsqueeze(-1)], dim=-1)


def centred(
    positions: Tensor, q: Tensor, feature_map: AbstractFeatureMap, window: int = 0
) -> HeadParticles:
    """Choose the tilt that centres queries, `t + mean_l u_l = mean(q) / sqrt(d)`."""
    tilt = q.mean(dim=1) / math.sqrt(q.shape[-1]) - mean_key_particle(positions)
    return HeadParticles(positions, tilt, feature_map, window)


def orthogonal_favor(
    heads: int, n_features: int, dim: int, *, generator: torch.Generator
) -> HeadParticles:
    """Draw the particles of FAVOR+ with orthogonal blocks, the control of learning."""
    law = Orthogonal(1.0)
    draws = [law.draw(n_features, dim, generator=generator) for _ in range(heads)]
    return untilted(torch.stack(draws), as_positive_map(SOFTMAX_KERNEL_MAP))


def landmark_start(
    q: Tensor, k: Tensor, n_features: int, *, generator: torch.Generator
) -> Tensor:
    """Place particles at landmarks of the keys.

    Examples
    --------
    >>> x = torch.eye(4).repeat(1, 5, 1)
    >>> landmark_start(x, x, 4, generator=torch.Generator()).shape
    torch.Size([1, 4, 10])
    """
    dim = q.shape[-1]
    centre, query = (x.mean(dim=1, keepdim=True) for x in (k, q))
    root, inverse = _metric(q - query)
    y = (k - centre) @ root
    landmarks = _k_means(y, n_features, generator=generator)
    spread = y.square().mean(dim=(1, 2))[:, None, None].clamp_min(1e-12)
    scaled = landmarks / (_WIDTH * spread)
    w = landmarks @ inverse / math.sqrt(dim)
    a = -(w * query).sum(dim=-1)
    u = scaled @ root.transpose(1, 2)
    b = -0.5 * (scaled * landmarks).sum(dim=-1) - (u * centre).sum(dim=-1)
    return torch.cat([w, a.unsqueeze(-1), u, b.unsqueeze(-1)], dim=-1)


def _metric(q: Tensor) -> tuple[Tensor, Tensor]:
    # |R' k|^2 is the variance of q . k / sqrt(d) over the (centred) queries.
    covariance = q.transpose(1, 2) @ q / (q.shape[1] * q.shape[-1])
    values, vectors = torch.linalg.eigh(covariance)
    floor = (_FLOOR * values.amax(dim=-1, keepdim=True)).clamp_min(1e-12)
    roots = values.clamp_min(0).maximum(floor).sqrt().unsqueeze(1)
    return vectors * roots, (vectors / roots).transpose(1, 2)


def _k_means(y: Tensor, n_centres: int, *, generator: torch.Generator) -> Tensor:
    heads, n, _ = y.shape
    if n < n_centres:  # few tokens: some landmarks coincide until they are moved
        first = torch.randint(n, (n_centres,), generator=generator)
    else:
        first = torch.randperm(n, generator=generator)[:n_centres]
    centres = y[:, first]
    for _ in range(_K_MEANS_ROUNDS):
        half = 0.5 * centres.square().sum(dim=-1).unsqueeze(1)
        nearest = (y @ centres.transpose(1, 2) - half).argmax(dim=-1)
        counts = y.new_zeros(heads, n_centres)
        counts.scatter_add_(1, nearest, torch.ones_like(nearest, dtype=y.dtype))
        sums = torch.zeros_like(centres)
        sums.scatter_add_(1, nearest.unsqueeze(-1).expand_as(y), y)
        full = counts.unsqueeze(-1)
        centres = torch.where(full > 0, sums / full.clamp_min(1), centres)
    return centres


class LayerFit(NamedTuple):
    """What was learned of a layer, with the divergence of its rows on held-out text."""

    positions: Tensor
    tilt: Tensor
    before: Tensor  # (heads,), KL at the start
    after: Tensor  # (heads,)
    random: Tensor  # (heads,), KL of orthogonal random features, as many
    steps: int


def fit_layer(
    batches: Sequence[Rows],
    held_out: Sequence[Rows],
    settings: LineariseSettings,
    *,
    generator: torch.Generator,
    watch: Callable[[], None] = lambda: None,
) -> LayerFit:
    """Move the particles; every head keeps the best it had on held-out text."""
    start = _start(batches, settings, generator)
    few = [rows.some_queries(_HELD_ROWS, generator=generator) for rows in held_out]

    imitate = partial(imitations.build, start=start)

    @torch.no_grad()
    def judge(positions: Tensor, kind: str = settings.objective) -> Tensor:
        return imitate(kind, batches=few).energy(Particles(positions))

    best = start.positions
    if settings.shared:
        best = best[..., : best.shape[-1] // 2].clone()
    before, score = judge(best, "kl"), judge(best)
    beta = settings.inverse_temperature
    sampler = AdamLangevin(settings.step_size, inverse_temperature=beta)
    state = sampler.init(Particles(best))
    order: list[int] = []
    done = idle = 0
    while done < settings.steps and idle < settings.patience:
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        batch = batches[order.pop()]
        rows = batch.some_queries(settings.rows, generator=generator)
        objective = imitate(settings.objective, batches=[rows])
        energy = Hamiltonian(objective, _REPULSION, settings.repulsion)
        move = _ramped(sampler, done, settings.steps).step
        state, _ = move(state, energy, generator=generator)
        watch()
        done += 1
        if done % settings.check_every and done < settings.steps:
            continue
        positions = state.particles.positions
        value = judge(positions)
        gained = value < score
        best = torch.where(gained[:, None, None], positions, best)
        score = torch.where(gained, value, score)
        idle = 0 if bool(gained.any()) else idle + 1
    after = judge(best, "kl")
    if settings.shared:
        best = torch.cat([best, best], dim=-1)
    _, heads, _, dim = few[0].q.shape
    favor = orthogonal_favor(heads, settings.n_features, dim, generator=generator)
    random = RowDivergence.measure(few, favor)
    return LayerFit(best, start.tilt, before, after, random, done)


def _start(
    batches: Sequence[Rows], settings: LineariseSettings, generator: torch.Generator
) -> HeadParticles:
    feature_map = as_positive_map(settings.feature_map)
    parts = [[_real(x, rows.key_mask) for x in (rows.q, rows.k)] for rows in batches]
    q, k = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    if q.shape[1] > _SAMPLE:
        chosen = torch.randperm(q.shape[1], generator=generator)[:_SAMPLE]
        q, k = q[:, chosen], k[:, chosen]
    if settings.from_landmarks:
        positions = landmark_start(q, k, settings.n_features, generator=generator)
    else:
        size = len(q), settings.n_features, q.shape[-1]
        positions = for_both(drawn(size, feature_map, generator).to(q))
    return centred(positions, q, feature_map, settings.near)


def _real(x: Tensor, mask: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2)[:, mask.flatten()]


def _ramped(sampler: AdamLangevin, step: int, steps: int) -> AdamLangevin:
    """Shape the steps: a short rise, then half a cosine down to nearly zero.

    Examples
    --------
    >>> samplers = [_ramped(AdamLangevin(1.0), n, 100) for n in (0, 10, 50, 99)]
    >>> [round(sampler.step_size, 2) for sampler in samplers]
    [0.1, 0.99, 0.51, 0.01]
    """
    rise = min(1.0, (step + 1) / _WARM_UP)
    size = rise * (0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)
    return replace(sampler, step_size=sampler.step_size * size)


def pool(hidden: Tensor, mask: Tensor, kind: str = "mean") -> Tensor:
    """Make unit embeddings from hidden states.

    Examples
    --------
    >>> hidden = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]])
    >>> pool(hidden, torch.tensor([[True, False]]))
    tensor([[0.6000, 0.8000]])
    """
    if kind == "first":
        return functional.normalize(hidden[:, 0], dim=-1)
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return functional.normalize((hidden * weights).sum(dim=1), dim=-1)


@dataclass(frozen=True, eq=False)
class Distillation(AbstractObjective):
    """Relative squared error of hidden states, and one minus the cosine of embeddings.

    `mean_l |h_l - h*_l|^2 / |h*_l|^2 + 1 - cos(e, e*)`, over real tokens, with the sums
    of all processes.
    """

    student: Stack
    batch: Batch
    targets: Sequence[Tensor]
    pooling: str | None = "mean"
    ranks: Ranks = ALONE

    def energy(self, particles: Particles) -> Tensor:
        own = self.own_energy(particles)
        total = own.detach().clone()
        self.ranks.add([total])
        return own + (total - own.detach())

    def field(self, particles: Particles) -> Field:
        found = super().field(particles)
        self.ranks.add([found.gradient])
        return found

    def own_energy(self, particles: Particles) -> Tensor:
        """Evaluate the part of this process's texts."""
        targets = self.targets
        names = particle_names(self.student)
        parameters = dict(zip(names, particles.positions.unbind(), strict=True))
        with torch.no_grad():
            begun = self.student.begin(self.batch)
            mask = self.student.tokens(self.batch)
        states = functional_call(self.student, parameters, begun)
        weights = mask.unsqueeze(-1).to(targets[0].dtype)
        sizes = [(target * weights).square().sum() for target in targets]
        count = weights.new_tensor(len(weights))
        self.ranks.add([*sizes, count])
        parts = [
            ((state - target) * weights).square().sum() / size
            for state, target, size in zip(states, targets, sizes, strict=True)
        ]
        total = torch.stack(parts).mean()
        if self.pooling is not None:
            ends = states[-1], targets[-1]
            ours, theirs = (pool(end, mask, self.pooling) for end in ends)
            share = len(weights) / count
            total = total + share - share * (ours * theirs).sum(dim=-1).mean()
        return total


def particle_names(stack: Stack) -> list[str]:
    """List the parameters that hold learned particles, in the order of the blocks."""
    return [
        f"{name}.particles"
        for name, module in stack.named_modules()
        if isinstance(module, LinearisedHeads) and module.learned_heads
    ]


def distil(
    student: Stack,
    texts: Recording,
    held_out: Recording,
    settings: LineariseSettings,
    *,
    generator: torch.Generator,
    watch: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Move the particles of all layers so that hidden states agree."""
    names = particle_names(student)
    if not names or not settings.distil_steps:
        return math.nan, math.nan
    sampler = AdamLangevin(settings.distil_step_size, decay=(0.9, 0.98))
    positions = torch.stack([student.get_parameter(n).detach() for n in names])
    state = sampler.init(Particles(positions))

    def energy(part: Recording, number: int) -> Distillation:
        batch, targets = part.batches[number], part.states(number)
        return Distillation(student, batch, targets, settings.pooling, part.ranks)

    stride = max(1, len(held_out.batches) // _HELD_BATCHES)
    few = [energy(held_out, i) for i in range(0, len(held_out.batches), stride)]

    def judge(particles: Particles) -> float:
        with torch.no_grad():
            return float(torch.stack([part.energy(particles) for part in few]).mean())

    before = judge(state.particles)
    # Between one vote for each batch and one for each text: both kinds must be kept.
    weights = torch.tensor(texts.counts).double().sqrt()
    for step in range(settings.distil_steps):
        chosen = int(torch.multinomial(weights, 1, generator=generator))
        target = Hamiltonian(energy(texts, chosen))
        move = _ramped(sampler, step, settings.distil_steps).step
        state, _ = move(state, target, generator=generator)
        watch()
    after = judge(state.particles)
    best = texts.ranks.share(state.particles.positions if after < before else positions)
    student.load_state_dict(dict(zip(names, best, strict=True)), strict=False)
    return before, after
