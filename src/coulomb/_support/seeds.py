"""Random streams: independent generators named by numbers, never global state."""

import numpy as np
import torch


def make_generator(seed: int, *path: int) -> torch.Generator:
    """Make the generator that belongs to `seed` and a path of numbers.

    Generators of different paths are independent, so that a change in how much one
    part draws leaves the others as they were.

    Examples
    --------
    >>> a, b = make_generator(0, 1), make_generator(0, 1)
    >>> bool(torch.rand(1, generator=a) == torch.rand(1, generator=b))
    True
    """
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=path)
    word = sequence.generate_state(1, np.uint64)[0]
    # torch takes seeds below 2**63 without changing them
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))
