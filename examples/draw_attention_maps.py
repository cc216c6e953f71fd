"""Attention maps
==============

The weights of softmax attention, and those of kernel attention with the same
projections: with more features, the kernel comes closer. Nothing is trained here.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from coulomb.attention import KernelAttention

generator = torch.Generator().manual_seed(0)
with torch.random.fork_rng():
    torch.manual_seed(0)  # torch's own layers know no other way
    softmax = nn.MultiheadAttention(32, 2, batch_first=True)
x = torch.cumsum(torch.randn(1, 40, 32, generator=generator), dim=1) / 4
_, exact = softmax(x, x, x)

figure, axes = plt.subplots(1, 4, figsize=(11, 3), layout="constrained")
axes[0].imshow(exact[0].detach().numpy())
axes[0].set(title="softmax", xlabel="key", ylabel="query")
for ax, count in zip(axes[1:], (8, 64, 512), strict=True):
    layer = KernelAttention(
        32, 2, feature_map="favor", n_features=count, batch_first=True, generator=1
    )
    layer.load_state_dict(softmax.state_dict(), strict=False)
    _, weights = layer(x, x, x)
    error = (weights - exact).abs().sum(dim=-1).mean() / 2
    ax.imshow(weights[0].detach().numpy(), vmax=exact.max().item())
    ax.set(title=f"{count} features, {100 * error:.0f} % misplaced", yticks=[])
plt.show()
