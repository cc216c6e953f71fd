"""The rows of the paper's tables: which attention, which map, what Phase A does.

Every row is one name, never a class. Nothing heavy is imported before one is built.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coulomb._support.errors import unknown_name

if TYPE_CHECKING:
    from coulomb.attention.encoder.encoder import AttentionFactory
    from coulomb.text.settings import TextSettings

# The paper's maps, and the law their particles start from.
_NAMES = ("favor", "elu", "softplus", "sigmoid2", "softmaxfeat", "cos2")
_MAPS = {name: (name, "gaussian") for name in _NAMES}
_MAPS["porf-softplus"] = ("softplus", "orthogonal")
# What becomes of the particles between their draw and Phase B.
_PHASES = {
    "vanilla": "none",
    "kernel": "align",
    "control": "control",
    "noise": "noise",
    "placed": "place",
    "strewn": "strew",
}


@dataclass(frozen=True)
class Variant:
    """One row: what attends, and what Phase A does to its particles."""

    name: str
    layer: str
    feature_map: str = ""
    law: str = ""
    qkv: str = "learned"
    phase_a: str = "none"


def _rows() -> dict[str, Variant]:
    rows = {
        "softmax": Variant("softmax", "softmax"),
        "favor-wqwk": Variant("favor-wqwk", "kernel", "favor", "gaussian"),
        "performer": Variant("performer", "performer"),
        "linformer": Variant("linformer", "linformer"),
    }
    for prefix, phase in _PHASES.items():
        for short, (feature_map, law) in _MAPS.items():
            name = f"{prefix}-{short}"
            rows[name] = Variant(name, "kernel", feature_map, law, "shared", phase)
    return rows


VARIANTS = _rows()
PAPER_ROWS = tuple(
    name
    for name in VARIANTS
    if not name.startswith(("control-", "noise-", "placed-", "strewn-"))
)


def find_variant(name: str) -> Variant:
    """Give a row by its name.

    Examples
    --------
    >>> find_variant("vanilla-cos2").feature_map
    'cos2'
    >>> len(PAPER_ROWS)
    18
    """
    if name not in VARIANTS:
        raise unknown_name("attention", name, VARIANTS)
    return VARIANTS[name]


def uses_windows(settings: "TextSettings", kind: str) -> bool:
    """Say whether heads look at windows beside a token."""
    row = find_variant(settings.model.attention)
    chosen = row.phase_a in ("align", "control") and settings.align.start == "chosen"
    windows = row.phase_a == "strew" or (chosen and kind == "token")
    return windows and settings.model.positions == "learned"


def attention_factory(settings: "TextSettings", kind: str) -> "AttentionFactory":
    """Make what builds the attention layers of a row."""
    from functools import partial

    from coulomb.attention.layers.baselines import (
        Linformer,
        Performer,
        SoftmaxAttention,
    )
    from coulomb.attention.layers.kernel import KernelAttention
    from coulomb.dynamics.initial import Gaussian, Orthogonal
    from coulomb.features import feature_maps

    model = settings.model
    row = find_variant(model.attention)
    if row.layer == "softmax":
        return SoftmaxAttention
    if row.layer == "performer":
        return partial(
            Performer, n_features=model.n_features, redraw_every=model.redraw_every
        )
    if row.layer == "linformer":
        return partial(
            Linformer, max_length=model.max_length, rank=model.linformer_rank
        )
    tempered = feature_maps.build(row.feature_map).tempered
    options = {"temperature": model.feature_temperature} if tempered else {}
    feature_map = feature_maps.build(row.feature_map, **options)
    head_dim = model.width // model.n_heads
    variance = model.start_norm**2 / head_dim
    if feature_map.imitates_softmax or not variance:
        variance = 1.0
    law = (Gaussian if row.law == "gaussian" else Orthogonal)(variance)
    return partial(
        KernelAttention,
        feature_map=feature_map,
        n_features=model.n_features,
        qkv=row.qkv,
        start=law,
        tied=not uses_windows(settings, kind),
    )
