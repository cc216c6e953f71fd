"""Controls of learned features: everything the same but the alignment."""

import copy
from dataclasses import replace

import numpy as np
import torch

from coulomb.estimators import CoulombSampler
from coulomb.estimators._learning import learn
from coulomb.estimators._settings import resolve_settings
from coulomb.objectives import Sample


def noise_only(learned: CoulombSampler, seed: int) -> CoulombSampler:
    """Repeat a fit with the gradient of the alignment set to zero.

    The particles start from the law that was chosen, feel the same repulsion, prior,
    walls and noise at the same temperature for as many steps, and D of them are chosen
    in the same way. The labels are zero, so that `V = 0` everywhere.

    Parameters
    ----------
    learned
        A fitted sampler.
    seed
        Of everything drawn.

    Returns
    -------
    CoulombSampler
        A fitted copy with the same phases.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(60, 3))
    >>> sampler = CoulombSampler(8, random_state=0).fit(X, X[:, 0] > 0)
    >>> noise_only(sampler, 0).transform(X).shape
    (60, 8)
    """
    settings = resolve_settings(learned, seed)
    # Without labels two rows serve as well as all.
    x = torch.zeros(2, learned.random_weights_.shape[0], dtype=torch.float64)
    blind = Sample(x, torch.zeros(2, 1, dtype=torch.float64))
    settings = replace(
        settings,
        laws={learned.law_: settings.laws[learned.law_]},
        inverse_temperature=learned.inverse_temperature_,
    )
    found = learn(blind, torch.arange(2), 2, settings)
    twin = copy.deepcopy(learned)
    twin.particles_ = found.run.particles.positions.numpy()
    twin.random_weights_ = np.ascontiguousarray(twin.particles_[found.chosen.numpy()].T)
    return twin
