"""A phase portrait of two particles
=================================

Two particles on a line, in a potential with two wells. Arrows show where the drift
takes the pair. Without repulsion both may end in one well; with it, states in which
they share a well (on the diagonal) are left.
"""

import matplotlib.pyplot as plt
import torch

from coulomb import Riesz

axis = torch.linspace(-1.6, 1.6, 24, dtype=torch.float64)
first, second = torch.meshgrid(axis, axis + 1e-3, indexing="xy")
pairs = torch.stack([first, second], dim=-1)  # (rows, columns, 2)


def drift(pairs, strength):
    """Minus the gradient of the energy of the pair, by autograd."""
    pairs = pairs.clone().requires_grad_()
    wells = ((pairs**2 - 1) ** 2).sum(dim=-1)
    push = Riesz(s=0).radial((pairs[..., 0] - pairs[..., 1]).abs())
    return -torch.autograd.grad((wells + strength * push).sum(), pairs)[0]


figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for ax, strength in zip(axes, (0.0, 1.5), strict=True):
    flow = drift(pairs, strength)
    speed = flow.norm(dim=-1)
    unit = flow / (speed[..., None] + 0.3)
    ax.quiver(first, second, unit[..., 0], unit[..., 1], speed.clamp(max=5), scale=30)
    ax.plot([-1.6, 1.6], [-1.6, 1.6], "k:", linewidth=1)
    ax.set(title=f"repulsion {strength:g}", xlabel="particle 1", aspect="equal")
axes[0].set_ylabel("particle 2")
plt.show()
