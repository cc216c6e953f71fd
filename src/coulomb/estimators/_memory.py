"""A bounded, uniform random sample of all rows that partial_fit has seen."""

from typing import NamedTuple

import numpy as np

from coulomb.estimators._columns import Target

MOST_ROWS = 20_000


class Rows(NamedTuple):
    """Standardised rows with their targets and weights."""

    x: np.ndarray
    target: Target
    weight: np.ndarray


class Memory(NamedTuple):
    """Rows that are kept: those with the smallest random keys."""

    rows: Rows
    keys: np.ndarray
    seen: int  # rows so far, kept or not

    @classmethod
    def begin(cls, rows: Rows, seed: int) -> "Memory":
        """Remember the first chunk."""
        return cls(rows, _keys(seed, 0, len(rows.x)), len(rows.x))._trim()

    def add(self, rows: Rows, seed: int) -> "Memory":
        """Remember another chunk."""
        old = self.rows
        values = np.concatenate([old.target.values, rows.target.values])
        both = Rows(
            np.concatenate([old.x, rows.x]),
            Target(values, rows.target.classes),
            np.concatenate([old.weight, rows.weight]),
        )
        keys = np.concatenate([self.keys, _keys(seed, self.seen, len(rows.x))])
        return Memory(both, keys, self.seen + len(rows.x))._trim()

    def _trim(self) -> "Memory":
        keep = np.sort(np.argsort(self.keys, kind="stable")[:MOST_ROWS])
        x, target, weight = self.rows
        kept = Rows(x[keep], Target(target.values[keep], target.classes), weight[keep])
        return Memory(kept, self.keys[keep], self.seen)


def _keys(seed: int, seen: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, seen]).random(count)
