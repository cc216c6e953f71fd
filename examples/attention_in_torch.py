"""Linear attention in a torch model
=================================

A causal model reads three random letters, repeated over and over, and predicts the
next. One line swaps the attention of torch's own layers, which are then trained. At the
end all letters are read at once, and one by one with a state of fixed size.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from coulomb.attention import replace_attention

LETTERS, WIDTH, LENGTH = 8, 32, 24


class Model(nn.Module):
    """Embeddings, two of torch's encoder layers, and a head."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters):
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def step(self, letter, place, states):
        """Read one letter; what was read before is in the states."""
        x = self.letters(letter) + self.places.weight[place]
        for i, layer in enumerate(self.layers):
            attended, states[i] = layer.self_attn.decode(x, states[i])
            x = layer.norm1(x + attended)
            x = layer.norm2(x + layer._ff_block(x))
        return self.head(x)


def make_batch(n, generator):
    return torch.randint(LETTERS, (n, 3), generator=generator).repeat(1, LENGTH // 3)


def main():
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # torch's own layers know no other way
        model = Model()
    print(replace_attention(model, n_features=32, causal=True, generator=generator))

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(81):
        batch = make_batch(16, generator)
        loss = cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    text = make_batch(1, generator)
    with torch.no_grad():
        parallel = model.eval()(text).argmax(dim=-1)
        states = [None, None]
        steps = [model.step(text[:, t], t, states) for t in range(LENGTH)]
    recurrent = torch.stack(steps, dim=1).argmax(dim=-1)
    correct = (recurrent[:, 2:-1] == text[:, 3:]).double().mean()
    print(f"letters predicted once the pattern is known: {correct:.0%}")
    assert torch.equal(recurrent, parallel)


if __name__ == "__main__":
    main()
