"""Controls of learned features: everything the same but the alignment."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from coulomb._support.errors import ParameterError
from coulomb._support.streams import make_generator
from coulomb.estimators._learning import Table, learn
from coulomb.estimators._settings import resolve_settings
from coulomb.objectives import Sample


def norm_matched(learned: Any, seed: int) -> Any:
    """Draw the directions of learned features anew; norms and sparsity stay."""
    generator = make_generator(seed)
    weights = learned.random_weights_[learned._varying].T
    drawn = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    order = torch.rand(weights.shape, generator=generator).argsort(dim=1).numpy()
    drawn = drawn.numpy() * (order < (weights != 0).sum(axis=1, keepdims=True))
    size = np.linalg.norm(drawn, axis=1, keepdims=True)
    norm = np.linalg.norm(weights, axis=1, keepdims=True)
    twin = copy.deepcopy(learned)
    twin.random_weights_ = twin._embed((drawn / np.where(size, size, 1) * norm).T)
    twin.particles_ = twin.random_weights_.T.copy()
    return twin


def noise_only(learned: Any, seed: int) -> Any:
    """Repeat a fit with the gradient of the alignment set to zero."""
    twin = copy.deepcopy(learned)
    dim = int(learned._varying.sum())
    if dim == 0:
        return twin
    settings = resolve_settings(learned, seed)
    kept = learned.random_offset_.shape[0]
    if learned.law_ not in settings.laws or settings.n_components != kept:
        raise ParameterError(
            "`gamma`, `coordinates` and `n_components` must be those of the fit, which "
            f"gave {kept} features of the law {learned.law_!r}; fit again."
        )
    settings = replace(
        settings,
        laws={learned.law_: settings.laws[learned.law_]},
        inverse_temperature=learned.inverse_temperature_,
        max_iter=learned.n_iter_,
        pursuit=0,
        # Where V = 0 there is nothing to watch, and no rows to choose from.
        tol=0.0,
        stopping="settled",
        batch_size=None,
        progress=False,
    )
    # Without labels two rows serve as well as all.
    x = torch.zeros(2, dim, dtype=torch.float64)
    blind = Sample(x, torch.zeros(2, 1, dtype=torch.float64))
    found = learn(Table(blind, torch.arange(2), 2), settings)
    positions = found.run.particles.positions.numpy()
    twin.particles_ = twin._embed(positions.T).T
    twin.random_weights_ = twin._embed(positions[found.chosen.numpy()].T)
    twin.n_pursued_ = 0
    return twin
