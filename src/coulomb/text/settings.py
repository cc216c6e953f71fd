"""Every hyper-parameter of a text classifier, its rows and presets, and TOML files.

A row of the paper's tables says which attention, which map and what Phase A does: a
name, never a class.

Nothing heavy is imported here: the command line builds its flags from this file.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, dataclass_transform, get_args

from coulomb._support.checks import check_count, check_member, check_real, packaged
from coulomb._support.errors import (
    FileFormatError,
    ParameterError,
    ParameterTypeError,
    shown,
)

_ABOUT = packaged("coulomb.text", "settings.toml")
_ROWS: dict[str, dict[str, Any]] = _ABOUT["rows"]


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
    for prefix, phase in _ROWS["phases"].items():
        for short, (feature_map, law) in _ROWS["maps"].items():
            name = f"{prefix}-{short}"
            rows[name] = Variant(name, "kernel", feature_map, law, "shared", phase)
    return rows


VARIANTS = _rows()
PAPER_ROWS = tuple(n for n, x in VARIANTS.items() if x.phase_a in ("none", "align"))


def find_variant(name: str) -> Variant:
    """Give a row by its name.

    Examples
    --------
    >>> find_variant("vanilla-cos2").feature_map
    'cos2'
    >>> len(PAPER_ROWS)
    18
    """
    check_member("attention", name, VARIANTS)
    return VARIANTS[name]


Group = TypeVar("Group")


@dataclass_transform(frozen_default=True)
def _described(group: str) -> Callable[[type[Group]], type[Group]]:
    """Make a data class whose fields have what `settings.toml` says of them."""

    def describe(kind: type[Group]) -> type[Group]:
        for name, about in _ABOUT[group].items():
            setattr(kind, name, field(metadata=about))
        return dataclass(frozen=True)(kind)

    return describe


@_described("model")
class ModelSettings:
    """The encoder and its attention."""

    attention: str
    encoder: str
    linearise: Literal["before", "after"]
    window: int
    n_layers: int
    width: int
    n_heads: int
    ffn_width: int
    dropout: float
    positions: Literal["learned", "parts", "none"]
    norm: Literal["post", "pre"]
    pooling: Literal["mean", "cls"]
    max_length: int
    n_features: int
    feature_temperature: float
    start_norm: float
    linformer_rank: int
    redraw_every: int


@_described("tokens")
class TokenSettings:
    """How texts are cut into tokens."""

    vocabulary_size: int
    lower_case: bool


@_described("align")
class AlignSettings:
    """Phase A, by names of `coulomb.attention.AlignmentSettings` where it has one."""

    after: int
    start: Literal["drawn", "windows", "chosen"]
    shifts: str
    epochs: float
    objective: Literal["auto", "centred", "within-class", "likelihood", "neighbours"]
    level: Literal["sequence", "token", "layer", "head"]
    sampler: Literal["langevin", "adam"]
    step_size: float
    inverse_temperature: float
    drift: Literal["N", "plain"]
    clip: float
    strength: float
    riesz: float
    radius: float
    tol: float
    patience: int
    also: str


@_described("train")
class TrainSettings:
    """Phase B, and the seed of both phases."""

    tune: Literal["all", "head"]
    epochs: int
    min_steps: int
    batch_size: int
    optimiser: Literal["adam", "adamw"]
    lr: float
    weight_decay: float
    schedule: Literal["constant", "linear", "cosine"]
    warm_up_share: float
    label_smoothing: float
    word_dropout: float
    rare_tokens: int
    average_epochs: float
    seed: int


GROUPS: dict[str, type] = {
    "model": ModelSettings,
    "tokens": TokenSettings,
    "align": AlignSettings,
    "train": TrainSettings,
}
# Every setting by the name that flags, files and `changed` know it by, with its group.
SETTINGS: dict[str, tuple[str, Field[Any]]] = {
    f"align_{part.name}" if group == "align" else part.name: (group, part)
    for group, record in GROUPS.items()
    for part in fields(record)
}
# Settings that came later, and what was done before them.
_LATER = {
    name: part.metadata["before"]
    for name, (_, part) in SETTINGS.items()
    if "before" in part.metadata
}
_RULES = ("above", "at_least", "at_most", "below", "infinite")
LOWER_IS_BETTER = ("log_loss", "brier", "ece", "ece_paper", "rmse", "mae")
OF_PRETRAINED = ("auto", "softmax", "linear")


@dataclass(frozen=True, init=False)
class TextSettings:
    """What a classifier is and how it is trained. There are no defaults: see `PRESETS`.

    Settings are in four groups, and each can be read by its own name too, those of
    Phase A as `align_...`: `settings.train.lr` is `settings.lr`, and
    `settings.align.epochs` is `settings.align_epochs`. What each means is said in
    `settings.toml`, beside its rule and its values.

    Parameters
    ----------
    **values
        The groups `model` (`ModelSettings`), `tokens` (`TokenSettings`), `align`
        (`AlignSettings`) and `train` (`TrainSettings`), or settings by their own names,
        which win.

    Examples
    --------
    >>> from coulomb.text.settings import preset
    >>> chosen = preset("paper-supplement")
    >>> chosen.train.lr, chosen.lr, chosen.align.step_size, chosen.align_step_size
    (0.0002, 0.0002, 0.002, 0.002)
    >>> preset("default").changed({"epchs": 3})
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `settings` has no member 'epchs'; did you
    mean 'epochs'? Known: ...
    """

    model: ModelSettings
    tokens: TokenSettings
    align: AlignSettings
    train: TrainSettings

    def __init__(self, **values: Any) -> None:
        groups = {n: x for n, x in values.items() if isinstance(x, GROUPS.get(n, ()))}
        given = {n: x for n, x in values.items() if n not in groups}
        for name in given:
            check_member("settings", name, SETTINGS)
        for name, (group, part) in SETTINGS.items():
            if group in groups:
                given.setdefault(name, getattr(groups[group], part.name))
        missing = [name for name in SETTINGS if name not in given]
        if missing:
            raise ParameterError(
                f"`settings` must hold all settings; missing: {', '.join(missing)}."
            )
        parts: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
        for name, (group, part) in SETTINGS.items():
            parts[group][part.name] = _checked(name, part, given[name])
        for group, record in GROUPS.items():
            object.__setattr__(self, group, record(**parts[group]))
        self._check_together()

    def __getattr__(self, name: str) -> Any:
        if name not in SETTINGS:
            raise AttributeError(f"TextSettings has no setting {name!r}.")
        group, part = SETTINGS[name]
        return getattr(getattr(self, group), part.name)

    def _check_together(self) -> None:
        model, align, train = self.model, self.align, self.train
        if model.encoder and model.attention not in OF_PRETRAINED:
            raise ParameterError(
                f"`attention` must be one of {', '.join(OF_PRETRAINED)} with `encoder`;"
                f" got {model.attention!r}. Use the preset 'pretrained'."
            )
        if not model.encoder:
            find_variant(model.attention)
            if train.tune != "all":
                raise ParameterError("`tune` must be 'all' without `encoder`.")
        if align.shifts:
            read_shifts(align.shifts)
        if model.width % model.n_heads:
            raise ParameterError(
                f"`width` must be divisible by `n_heads`; got {model.width} and "
                f"{model.n_heads}."
            )
        if align.after >= train.epochs:
            raise ParameterError(
                f"`align_after` must be less than `epochs`; got {align.after} and "
                f"{train.epochs}."
            )
        if align.sampler == "adam" and math.isfinite(align.inverse_temperature):
            raise ParameterError(
                "`align_inverse_temperature` must be inf with the sampler 'adam'; got "
                f"{align.inverse_temperature:g}."
            )
        if train.weight_decay and train.optimiser == "adam":
            raise ParameterError(
                "`weight_decay` must be 0 with the optimiser 'adam'; got "
                f"{train.weight_decay:g}. Use 'adamw'."
            )

    def changed(self, changes: Mapping[str, Any]) -> "TextSettings":
        """Replace some settings.

        Parameters
        ----------
        changes
            New values by name.

        Returns
        -------
        TextSettings
            A checked copy.
        """
        return TextSettings(**{**vars(self), **changes})

    def plain(self) -> dict[str, Any]:
        """Give the settings as data for JSON, where infinity is a word.

        Returns
        -------
        dict
            Strings, numbers and truth values by the names of flags.
        """
        values = {name: getattr(self, name) for name in SETTINGS}
        return {
            name: "inf" if isinstance(value, float) and math.isinf(value) else value
            for name, value in values.items()
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "TextSettings":
        """Read what `plain` gave.

        Parameters
        ----------
        values
            All settings by name; those that runs of earlier versions did not know are
            taken at the value that changes nothing.

        Returns
        -------
        TextSettings
            Checked.
        """
        return cls(**{**_LATER, **values})


def read_shifts(text: str) -> tuple[int, ...]:
    """Read shifts from a setting.

    Examples
    --------
    >>> read_shifts("-1, 1")
    (-1, 1)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(
            "`align_shifts` must be whole numbers with commas between them, such as "
            f"'-1,1', or empty; got {text!r}."
        ) from None


def _checked(name: str, part: Field[Any], value: Any) -> Any:
    kind: Any = part.type
    if get_args(kind):
        check_member(name, value, get_args(kind))
        return value
    if kind is float:
        if value == "inf":
            value = math.inf
        elif isinstance(value, int) and not isinstance(value, bool):
            value = check_real(name, value)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
        words = {int: "a whole number", float: "a number", bool: "true or false"}
        raise ParameterTypeError(
            f"`{name}` must be {words.get(kind, 'a string')}; got {shown(value)}."
        )
    check: Any = {int: check_count, float: check_real}.get(kind)
    rule = {limit: x for limit, x in part.metadata.items() if limit in _RULES}
    return value if check is None else check(name, value, **rule)


def _read_presets() -> dict[str, TextSettings]:
    """Give ours, the paper's supplement, and what `presets.toml` changes of them."""
    about = {name: part.metadata for name, (_, part) in SETTINGS.items()}
    ours = TextSettings(**{name: about[name]["ours"] for name in about})
    theirs = {name: x["paper"] for name, x in about.items() if "paper" in x}
    found = {"default": ours, "paper-supplement": ours.changed(theirs)}
    for name, changes in packaged("coulomb.text", "presets.toml").items():
        found[name] = found[changes.pop("base")].changed(changes)
    return found


PRESETS = _read_presets()


def preset(name: str, changes: Mapping[str, Any] | None = None) -> TextSettings:
    """Give a preset, with some settings replaced.

    Parameters
    ----------
    name
        One of `PRESETS`.
    changes
        New values by name.

    Returns
    -------
    TextSettings
        Checked.
    """
    check_member("preset", name, PRESETS)
    return PRESETS[name].changed(changes or {})


# Keys with many dots take tomllib the square of their length.
_MOST_TOML, _LONGEST_LINE = 2**16, 2**12


def read_toml(path: str | Path) -> tuple[str | None, dict[str, Any]]:
    """Read settings from a TOML file with one key per setting, and maybe `preset`."""
    from coulomb._support.archive import check_file

    try:
        text = check_file(path, _MOST_TOML).read_text("utf-8")
        if max(map(len, text.splitlines()), default=0) > _LONGEST_LINE:
            raise ValueError(f"a line has more than {_LONGEST_LINE:,} characters")
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not TOML: {error}.") from error
    name = values.pop("preset", None)
    for key in values:
        check_member(str(path), key, [*SETTINGS, "preset"])
    if name is not None:
        check_member("preset", name, PRESETS)
    return name, values


def to_toml(settings: TextSettings) -> str:
    """Write all settings as `read_toml` reads them, each with what it means."""
    values = settings.plain()
    lines = []
    for group, record in GROUPS.items():
        lines.append(f"\n# {group}: {(record.__doc__ or '').splitlines()[0]}")
        for name, (whose, part) in SETTINGS.items():
            if whose == group:  # strings, numbers and truth values: as JSON has them
                words = part.metadata["help"]
                lines.append(f"{name} = {json.dumps(values[name])}  # {words}")
    return "\n".join(lines).lstrip() + "\n"
