"""Every hyper-parameter of a text classifier, its rows and presets, and TOML files.

A row of the paper's tables says which attention, which map and what Phase A does: a
name, never a class.

Nothing heavy is imported here: the command line builds its flags from this file.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from coulomb._support.checks import check_count, check_member, check_real
from coulomb._support.errors import (
    FileFormatError,
    ParameterError,
    ParameterTypeError,
    shown,
)

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


def _about(words: str, ours: Any, paper: Any = None, **rule: Any) -> Any:
    """Describe a setting: our value, the paper's if it is another, and its rule."""
    values = {"ours": ours, "paper": ours if paper is None else paper}
    return field(metadata={"help": words, "rule": rule} | values)


@dataclass(frozen=True)
class ModelSettings:
    """The encoder and its attention.

    Parameters
    ----------
    encoder
        A pretrained encoder: the folder of a BERT, RoBERTa, DistilBERT or MPNet, a name
        on the Hugging Face hub, or "auto" for one that is installed. Empty for an
        encoder that is trained from scratch. A pretrained one has a shape and positions
        of its own, whatever is said below.
    attention
        The row of the paper's tables; see `VARIANTS`. Of a pretrained encoder
        "softmax", "linear" (particles learned on the training texts, without labels),
        or "auto", which is linear for texts of 500 tokens or more.
    linearise
        Whether a pretrained encoder becomes linear "before" it is fine-tuned, or
        "after".
    window
        Tokens at most so far from a query are compared exactly by linear attention of a
        pretrained encoder; 0 for none.
    n_layers, width, n_heads, ffn_width
        The encoder's shape.
    dropout
        Of embeddings, of both branches of each layer and inside the feed-forward part.
    positions, norm, pooling
        As in `EncoderSettings`.
    max_length
        Tokens of a sequence; longer texts are cut.
    n_features
        Particles of each head.
    feature_temperature
        `tau` of the maps that have one.
    start_norm
        The usual norm of particles at the start; 0 for unit variance. FAVOR keeps unit
        variance, which alone makes it unbiased.
    linformer_rank
        Mixtures of keys in Linformer.
    redraw_every
        Steps between two draws of the Performer's features; 0 for never.
    """

    attention: str = _about(
        "Row of the paper's tables, softmax, or with --encoder linear or auto.",
        "kernel-softmaxfeat",
    )
    encoder: str = _about("Pretrained: folder, hub name, or auto.", "")
    linearise: Literal["before", "after"] = _about(
        "Linear attention before or after fine-tuning.", "before"
    )
    window: int = _about("Tokens this near are compared exactly.", 8, at_least=0)
    n_layers: int = _about("Layers.", 2, at_most=1000)
    width: int = _about("Width of a token's state.", 128)
    n_heads: int = _about("Heads.", 2)
    ffn_width: int = _about("Width inside the feed-forward part.", 256)
    dropout: float = _about("Dropout.", 0.3, 0.1, at_least=0, below=1)
    positions: Literal["learned", "parts", "none"] = _about(
        "Position embeddings, of tokens or of the parts of a pair.", "learned"
    )
    norm: Literal["post", "pre"] = _about("Layer norm.", "post")
    pooling: Literal["mean", "cls"] = _about("Pooling.", "mean")
    max_length: int = _about("Tokens of a text; longer ones are cut.", 128, at_least=3)
    n_features: int = _about("Particles of each head.", 256)
    feature_temperature: float = _about("tau of the feature map.", 1.0, above=0)
    start_norm: float = _about(
        "Norm of particles at the start; 0: N(0, I).", 1.5, 0.0, at_least=0
    )
    linformer_rank: int = _about("Mixtures of keys in Linformer.", 64)
    redraw_every: int = _about("Steps between the Performer's draws.", 1000, at_least=0)


@dataclass(frozen=True)
class TokenSettings:
    """How texts are cut into tokens.

    Parameters
    ----------
    vocabulary_size
        Of a vocabulary trained on the texts, where none is given.
    lower_case
        Whether texts are lower-cased.
    """

    vocabulary_size: int = _about(
        "Size of a vocabulary trained here.", 8000, 30522, at_least=8, at_most=10**6
    )
    lower_case: bool = _about("Lower-case the texts.", True)


@dataclass(frozen=True)
class AlignSettings:
    """Phase A, by the names of `coulomb.attention.AlignmentSettings` where it has one.

    Parameters
    ----------
    after
        Epochs of Phase B after which Phase A interrupts it; 0 begins with Phase A.
    start
        Where Phase A begins: with the particles as "drawn", for tags with "windows" of
        positions around the token itself, or with what labels have "chosen": windows
        before and after a token for tags, and for 5,000 or more pairs of texts with
        `positions = "parts"` particles that do not see the part. Other texts keep what
        was drawn.
    shifts
        Which windows of tags, such as "-1,1", used in turn by the heads; empty lets the
        labels choose.
    epochs
        The length of Phase A, at most; fractions count.
    objective, level, sampler
        As in `AlignmentSettings`; "likelihood" has no levels. "auto" is "neighbours"
        for tags (do tokens attend to their class?), else "centred".
    step_size, inverse_temperature, drift, clip
        `eta`, `beta`, the scale of the drift, the largest drift of a particle.
    strength, riesz
        `lambda` and `s` of the repulsion; `s = 0` is the logarithm.
    radius
        The largest norm of a particle in Phase A; infinity for none.
    tol
        Phase A ends when particles move less between windows; 0 never does.
    patience
        Phase A ends when held-out alignment has not improved for so many records; 0
        never does.
    also
        Other parameters that Phase A moves, such as "norm,value"; empty for none.
    """

    after: int = _about("Epochs of Phase B before it.", 0, at_least=0)
    start: Literal["drawn", "windows", "chosen"] = _about(
        "Where particles begin.", "chosen", "drawn"
    )
    shifts: str = _about("Shifts such as -1,1; empty: by labels.", "")
    epochs: float = _about("Its length, at most.", 0.0, 10.0, at_least=0)
    objective: Literal[
        "auto", "centred", "within-class", "likelihood", "neighbours"
    ] = _about("What is aligned.", "centred", "within-class")
    level: Literal["sequence", "token", "layer", "head"] = _about(
        "Of what it is aligned.", "sequence"
    )
    sampler: Literal["langevin", "adam"] = _about("How particles move.", "langevin")
    step_size: float = _about("eta.", 1.0, 2e-3, above=0)
    inverse_temperature: float = _about("beta.", 1e5, 50.0, above=0, infinite=True)
    drift: Literal["N", "plain"] = _about("Scale of the drift.", "N")
    clip: float = _about("Bound of the drift.", 1.0, 10.0, above=0, infinite=True)
    strength: float = _about("lambda of the repulsion.", 1e-3, at_least=0)
    riesz: float = _about("s of the repulsion; 0: logarithm.", 0.0, above=-2)
    radius: float = _about(
        "Largest norm of a particle, or inf.", math.inf, 1.5, above=0, infinite=True
    )
    tol: float = _about("Stop below this movement; 0: never.", 0.0, 1e-6, at_least=0)
    patience: int = _about("Records without gain; 0: any number.", 0, at_least=0)
    also: str = _about("Other parameters that move: norm,value.", "")


@dataclass(frozen=True)
class TrainSettings:
    """Phase B, and the seed of both phases.

    Parameters
    ----------
    tune
        What is trained of a pretrained encoder: "all" of it, or its "head" alone, in
        closed form, for few labels.
    epochs
        Of Phase B.
    min_steps
        Phase B goes on for more epochs until it has made so many steps; for few texts.
    batch_size
        Texts of a step, in both phases.
    optimiser, lr, weight_decay
        Of Phase B; weight decay acts on the matrices of the layers.
    schedule, warm_up_share
        The learning rate over Phase B, after a linear rise over this share of it.
    label_smoothing
        The share of a label that is spread over all classes.
    word_dropout
        The share of tokens that are replaced by the unknown one in training.
    rare_tokens
        Tokens that occur at most so often in training become the unknown one.
    average_epochs
        The memory, in epochs, of a running average of the weights, which is judged and
        kept in their place; 0 for none.
    seed
        Of everything drawn.
    """

    tune: Literal["all", "head"] = _about("What is trained of --encoder.", "all")
    epochs: int = _about("Epochs of cross-entropy.", 2, 10)
    min_steps: int = _about("Steps of Phase B, at least.", 500, 0, at_least=0)
    batch_size: int = _about("Texts of a step.", 64)
    optimiser: Literal["adam", "adamw"] = _about("Optimiser.", "adam")
    lr: float = _about("Learning rate.", 5e-4, 2e-4, above=0)
    weight_decay: float = _about("Weight decay of matrices.", 0.0, at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = _about(
        "Learning rate after its rise.", "linear", "constant"
    )
    warm_up_share: float = _about(
        "Share of steps in which lr rises.", 0.1, 0.0, at_least=0, below=1
    )
    label_smoothing: float = _about("Label smoothing.", 0.0, at_least=0, below=1)
    word_dropout: float = _about(
        "Share of tokens made unknown.", 0.1, 0.0, at_least=0, below=1
    )
    rare_tokens: int = _about("Tokens seen so rarely are unknown.", 1, 0, at_least=0)
    average_epochs: float = _about(
        "Memory of averaged weights; 0: none.", 1.0, 0.0, at_least=0
    )
    seed: int = _about("Seed of everything drawn.", 0, at_least=0, at_most=2**63 - 1)


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
    "align_start": "drawn",
    "align_shifts": "",
    "align_sampler": "langevin",
    "average_epochs": 0.0,
    "encoder": "",
    "linearise": "before",
    "tune": "all",
    "window": 0,
}
OF_PRETRAINED = ("auto", "softmax", "linear")


@dataclass(frozen=True, init=False)
class TextSettings:
    """What a classifier is and how it is trained. There are no defaults: see `PRESETS`.

    Settings are in four groups, and each can be read by its own name too, those of
    Phase A as `align_...`: `settings.train.lr` is `settings.lr`, and
    `settings.align.epochs` is `settings.align_epochs`.

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
    return value if check is None else check(name, value, **part.metadata["rule"])


def _read_presets() -> dict[str, TextSettings]:
    """Give ours, the paper's supplement, and what `presets.toml` changes of them."""
    found = {
        name: TextSettings(**{n: x.metadata[whose] for n, (_, x) in SETTINGS.items()})
        for name, whose in (("default", "ours"), ("paper-supplement", "paper"))
    }
    text = files("coulomb.text").joinpath("presets.toml").read_text("utf-8")
    for name, changes in tomllib.loads(text).items():
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
