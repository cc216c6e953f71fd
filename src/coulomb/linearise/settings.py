"""How an encoder is linearised."""

import math
from dataclasses import dataclass

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError, unknown_name
from coulomb.linearise.layers import as_positive_map
from coulomb.linearise.objectives import imitations

__all__ = ["LineariseSettings"]


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
        of rows; "raw-alignment" and "log-alignment" are controls.
    start
        "landmarks" of the keys (for `softmaxfeat`), "random", or "auto" for landmarks
        where the map has them.
    shared
        Whether queries and keys have the same particles.
    steps, step_size
        Steps of each layer, and the length of the first ones; it falls to zero.
    inverse_temperature
        `beta` of the noise; infinity for none.
    repulsion
        `lambda`, the strength of the log repulsion inside a head.
    check_every, patience
        Held-out texts are looked at so often; a layer stops after so many looks
        without a gain. The best particles seen are kept.
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
        512.
    batch_tokens, rows
        Tokens of a batch, and queries of each text that are compared in a step.
    long_share
        The share of tokens in texts over a quarter of `max_length`. Where there are
        fewer, short texts are joined.
    """

    n_features: int = 64
    feature_map: str = "softmaxfeat"
    objective: str = "kl"
    start: str = "auto"
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

    def __post_init__(self) -> None:
        for name in ("n_features", "check_every", "patience", "max_tokens", "rows"):
            check_count(name, getattr(self, name))
        for name in ("steps", "distil_steps"):
            check_count(name, getattr(self, name), at_least=0)
        if self.max_length is not None:
            check_count("max_length", self.max_length, at_least=2)
        check_count("batch_tokens", self.batch_tokens)
        check_real("step_size", self.step_size, above=0)
        check_real("distil_step_size", self.distil_step_size, above=0)
        check_real(
            "inverse_temperature", self.inverse_temperature, above=0, infinite=True
        )
        check_real("repulsion", self.repulsion, at_least=0)
        check_real("long_share", self.long_share, at_least=0, at_most=1)
        as_positive_map(self.feature_map)
        if self.objective not in imitations:
            raise unknown_name("objective", self.objective, imitations)
        _one_of("start", self.start, ("auto", "landmarks", "random"))
        _one_of("pooling", self.pooling, ("mean", "first", None))
        if self.start == "landmarks" and self.feature_map != "softmaxfeat":
            raise ParameterError(
                "`start` must be 'random' or 'auto' for the map "
                f"{self.feature_map!r}; got 'landmarks', which softmaxfeat has."
            )

    @property
    def from_landmarks(self) -> bool:
        """Whether particles start at landmarks."""
        return self.start != "random" and self.feature_map == "softmaxfeat"


def _one_of(name: str, value: str | None, known: tuple[str | None, ...]) -> None:
    if value not in known:
        shown = ", ".join(repr(choice) for choice in known)
        raise ParameterError(f"`{name}` must be one of {shown}; got {value!r}.")
