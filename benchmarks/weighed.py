"""A law whose parts the evidence weighs, against the defaults: not in the library yet.

    python benchmarks/weighed.py                # the paper's problem, other designs
    python benchmarks/weighed.py --design 42    # its own design
    python benchmarks/weighed.py --tables       # 13 tables, D = 256 and 64
    python benchmarks/weighed.py --oracle       # kernels that know the truth

The law is a mixture over groups of particles: on one column in a band of frequencies,
on a pair of columns, or on all. A regression on all groups at once has the covariance
`sum_g w_g K_g + s^2 I`, K_g the kernel of a group; five steps up its evidence give the
weights (each step multiplies `w_g` by `|y' C^-1 K_g C^-1 y| / tr(C^-1 K_g)`), and
features are drawn from the groups in these shares. On the paper's problem nothing else
is learned; on tables this is where the path of stages begins, and the law without
labels is a choice. Differences are paired, ± one standard error over trials or tables.
"""

import argparse
import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor

from accuracy import SETTINGS, difference
from coulomb import CoulombSampler
from coulomb.datasets import expected_accuracy, make_synthetic
from coulomb.dynamics.initial import Resampler
from coulomb.estimators.learning import Stage, _Path

BANDS = ((0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 8.0))
PAIR_WIDTHS, DENSE_WIDTHS = (0.25, 1.0), (0.0625, 0.25, 1.0, 4.0)  # of exp(-(m/k) r^2)
MOST_PAIRED = 10  # columns; of more, those of the largest weights
ROWS, STEPS = 400, 5
FIRST_DESIGN = 6000  # neither the paper's nor those of `accuracy.py --fresh`
LATER = ("scaled", "pursued", "moved")


class Group(NamedTuple):
    """Particles that share their columns and how far they spread there."""

    columns: tuple[int, ...]
    width: float = 0.0
    band: tuple[float, float] | None = None

    def kernel(self, x: Tensor, z: Tensor) -> Tensor:
        """Compute the kernel between rows."""
        x, z = x[:, list(self.columns)], z[:, list(self.columns)]
        if self.band is None:
            inner = x @ z.T
            square = x.square().sum(1)[:, None] + z.square().sum(1) - 2 * inner
            return torch.exp(-self.width / len(self.columns) * square.clamp_min(0))
        low, high = self.band
        gap = x - z.T
        gap = torch.where(gap.abs() < 1e-4, 1e-4, gap)
        return ((high * gap).sin() - (low * gap).sin()) / ((high - low) * gap)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw a frequency on the columns of the group."""
        if self.band is not None:
            unit = torch.rand(1, generator=generator, dtype=torch.float64)
            return self.band[0] + (self.band[1] - self.band[0]) * unit
        count = len(self.columns)
        normal = torch.randn(count, generator=generator, dtype=torch.float64)
        return normal * math.sqrt(2 * self.width / count)


def centred_kernels(x: Tensor, groups: list[Group]) -> Tensor:
    """Stack the kernels, a constant taken out of each, in rows."""
    kernels = (group.kernel(x, x) for group in groups)
    return torch.stack(
        [(k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()).ravel() for k in kernels]
    )


def weigh(kernels: Tensor, y: Tensor, steps: int = STEPS) -> Tensor:
    """Take some steps up the evidence, from equal weights."""
    n, outputs = y.shape
    weights, noise = torch.full((len(kernels),), 0.5 / len(kernels)), 0.5
    for _ in range(steps):
        covariance = (weights @ kernels).reshape(n, n)
        covariance.diagonal().add_(noise)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
        a = inverse @ y
        pull = (kernels @ (a @ a.T).ravel()).clamp_min(0)
        weights = weights * pull / (kernels @ inverse.ravel() * outputs).clamp_min(1e-6)
        noise *= float(a.square().sum() / (inverse.trace() * outputs))
    return (weights / weights.sum()).double()


def weighed_law(sample: Any) -> tuple[list[Group], Tensor]:
    """Give groups and their weights; pairs are only those of the heaviest columns."""
    x, y = sample.x.float(), sample.labels.float()
    y = y - y.mean(0)
    y = y / y.square().sum(1).mean().sqrt()
    dim = x.shape[1]
    groups = [Group((j,), band=band) for j in range(dim) for band in BANDS]
    groups += [Group(tuple(range(dim)), width) for width in DENSE_WIDTHS]
    kernels, columns = centred_kernels(x, groups), list(range(dim))
    if dim > MOST_PAIRED:
        single = weigh(kernels, y, 3)[: dim * len(BANDS)]
        heaviest = single.reshape(dim, -1).sum(1).argsort(descending=True)
        columns = sorted(heaviest[:MOST_PAIRED].tolist())
    if dim > 2:
        couples = itertools.combinations(columns, 2)
        pairs = [Group(pair, width) for pair in couples for width in PAIR_WIDTHS]
        groups += pairs
        kernels = torch.cat([kernels, centred_kernels(x, pairs)])
    return groups, weigh(kernels, y)


def start(path: _Path) -> Stage:
    """Draw features from the groups, in the shares of their weights."""
    settings = path.fit.settings
    groups, weights = weighed_law(path.fit.some_rows(ROWS))
    generator, count = settings.generator("resampling"), settings.n_components
    chosen = Resampler("systematic")(weights, count, generator=generator)
    dim = path.fit.sample.x.shape[1]
    positions = torch.zeros(count, dim, dtype=torch.float64)
    for row, k in enumerate(chosen.tolist()):
        positions[row, list(groups[k].columns)] = groups[k].draw(generator)
    mixed = positions[torch.randperm(count, generator=generator)]
    return Stage(settings.with_phases(mixed), divergence=1.0)


def unbent(path: _Path, stage: Stage) -> Iterator[Stage]:
    yield path.drawn(0.0)


@contextlib.contextmanager
def weighed(*, alone: bool) -> Iterator[None]:
    """Begin with the weighed law, and end there if alone."""
    changes = {"start": start, "bent": unbent}
    if alone:
        changes |= dict.fromkeys(("bent", *LATER), lambda path, stage: iter(()))
    with contextlib.ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(mock.patch.object(_Path, name, change))
        yield


def problem(p: int, noise: float, trial: int, first: int) -> tuple[Any, ...]:
    seed = first if first == 42 else first + trial
    made = make_synthetic(n_features=p, noise=noise, seed=seed, trial=trial)
    rows = made.X[made.train], made.y[made.train], made.X[made.test]
    return *rows, made.probability[made.test]


def synthetic(first: int, trials: int) -> None:
    """Compare on the paper's problem, with its linear SVM."""
    ways = {
        "defaults": (contextlib.nullcontext, {}),
        "alignment": (contextlib.nullcontext, {"objective": "alignment"}),
        "weighed": (partial(weighed, alone=True), {}),
    }
    for count, (p, noise) in itertools.product((200, 64), SETTINGS):
        scores: dict[str, list[float]] = {name: [] for name in ways}
        for trial in range(trials):
            X, y, new, probability = problem(p, noise, trial, first)
            for name, (change, options) in ways.items():
                sampler = CoulombSampler(count, random_state=trial, **options)
                with change():
                    sampler.fit(X, y)
                model = SVC(kernel="linear").fit(sampler.transform(X), y)
                found = model.predict(sampler.transform(new))
                scores[name].append(float(expected_accuracy(found, probability)))
        cells = [f"{name} {np.mean(found):.4f}" for name, found in scores.items()]
        ours = np.array(scores["weighed"])
        gaps = [difference(ours, np.array(scores[n])) for n in list(ways)[:2]]
        cells += [f"minus it {100 * g:+.2f} ± {100 * e:.2f}" for g, e in gaps]
        print(f"D={count} p={p} sigma={noise}:", ", ".join(cells), flush=True)


def oracle(first: int, trials: int) -> None:
    """Give the SVM the exact kernel of the true groups, with about the true widths."""
    for p, noise in SETTINGS:
        true = [((0,), 5.0), ((1,), 0.25), ((2, 3), 0.5), ((4,), 4.0)]
        true += [((j,), 0.05) for j in range(5, p)]
        groups = [Group(columns, width) for columns, width in true]
        for penalty in (1, 10):
            scores = []
            for trial in range(trials):
                X, y, new, probability = problem(p, noise, trial, first)
                scaler = StandardScaler().fit(X)
                x, z = (torch.from_numpy(scaler.transform(rows)) for rows in (X, new))
                gram, cross = (sum(g.kernel(a, x) for g in groups) for a in (x, z))
                model = SVC(kernel="precomputed", C=penalty).fit(gram / len(true), y)
                found = model.predict(cross / len(true))
                scores.append(expected_accuracy(found, probability))
            print(f"p={p} sigma={noise} C={penalty}: {np.mean(scores):.4f}", flush=True)


def tables() -> None:
    """Compare on one split of the tables to develop on."""
    from fresh import DEVELOPMENT, Split, cpu, mean_and_error

    for count in (256, 64):
        gaps, ratios = [], []
        for name in DEVELOPMENT:
            split, scores, seconds = Split(name), [], []
            for change in (contextlib.nullcontext, partial(weighed, alone=False)):
                target = "classes" if split.classes else "number"
                sampler = CoulombSampler(count, target=target, random_state=0)
                with change():
                    found = cpu(lambda s=sampler, t=split: s.fit(t.X, t.y))
                seconds.append(found[1])
                scores.append(split.score(sampler.transform, split.X, split.new))
            gaps.append(scores[1] - scores[0])
            ratios.append(seconds[1] / seconds[0])
            print(count, name, f"{gaps[-1]:+.2f}", flush=True)
        text = f"{mean_and_error(np.array(gaps))}, CPU time {np.median(ratios):.1f}"
        print(f"D={count}, weighed minus defaults: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--design", type=int, default=FIRST_DESIGN)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--oracle", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.tables:
        tables()
    else:
        (oracle if args.oracle else synthetic)(args.design, args.trials)


if __name__ == "__main__":
    main()
