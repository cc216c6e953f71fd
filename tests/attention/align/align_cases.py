"""A small model with particles, and problems for it."""

import torch
from torch import Tensor, nn

from coulomb.attention.ops.api import kernel_attention
from coulomb.features import Particles


class TinyAttention(nn.Module):
    """Q = K = V = reshape(x): what a layer must have for Phase A, and no more."""

    def __init__(self, dim, heads, n_particles, *, feature_map, dtype, generator):
        super().__init__()
        self.feature_map = feature_map
        self.heads = heads
        drawn = torch.randn(
            heads, n_particles, dim // heads, generator=generator, dtype=dtype
        )
        self.particles = nn.Parameter(0.5 * drawn)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        split = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        particles = Particles(self.particles)
        out = kernel_attention(
            split, split, split, particles, self.feature_map, key_mask
        )
        return out.transpose(1, 2).flatten(2)


class TinyModel(nn.Module):
    """Layers of attention with residuals, norms and dropout, then mean and head."""

    def __init__(
        self,
        *,
        dim=4,
        heads=2,
        n_particles=6,
        layers=2,
        classes=2,
        feature_map="favor",
        dtype=torch.float32,
        seed=0,
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.attention = nn.ModuleList(
            TinyAttention(
                dim,
                heads,
                n_particles,
                feature_map=feature_map,
                dtype=dtype,
                generator=generator,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim, dtype=dtype)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(dim, classes, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(
                torch.randn(classes, dim, generator=generator, dtype=dtype)
            )
            self.head.bias.zero_()

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        for layer in self.attention:
            x = x + self.dropout(layer(self.norm(x), key_mask))
        if key_mask is None:
            return self.head(x.mean(dim=1))
        weight = key_mask.to(x).unsqueeze(-1)
        return self.head((weight * x).sum(dim=1) / weight.sum(dim=1))


def random_batches(
    count=3, *, size=6, length=5, dim=4, classes=3, dtype=torch.float32, seed=0
):
    """Inputs without meaning: masks, classes of sequences."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        inputs = torch.randn(size, length, dim, generator=generator, dtype=dtype)
        mask = torch.rand(size, length, generator=generator) < 0.7
        mask[:, 0] = True
        labels = torch.randint(classes, (size,), generator=generator)
        batches.append((inputs, mask, labels))
    return batches


def marked_batches(count, *, size=64, length=8, seed=0):
    """One token of each sequence is marked, and its value is the label.

    The second coordinate of every token is a sign; the label is the sign of the one
    token whose first coordinate is large. A kernel that looks at marked tokens tells
    the label; one that looks at all alike sees it among `length` signs.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        signs = torch.randint(2, (size, length), generator=generator)
        place = torch.randint(length, (size,), generator=generator)
        marks = torch.zeros(size, length)
        marks[torch.arange(size), place] = 1.5
        inputs = torch.stack([marks, 2.0 * signs - 1], dim=-1)
        noise = 0.1 * torch.randn(inputs.shape, generator=generator)
        batches.append((inputs + noise, signs[torch.arange(size), place]))
    return batches


def marked_model(seed=0, n_particles=8):
    """One layer, one head, no norm in the way: what the marked problem needs."""
    generator = torch.Generator().manual_seed(seed)
    return TinyAttention(
        2,
        1,
        n_particles,
        feature_map="favor",
        dtype=torch.float32,
        generator=generator,
    )
