"""Swapping the attention of a model that exists, with its weights, and saving it.

A model of Hugging Face transformers that was swapped is of a subclass of its class,
whose configuration says how its attention is built: `save_pretrained` and
`from_pretrained` work as they do for any model. transformers is never imported here
before a model of it is.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from coulomb._support.archive import (
    MOST_JSON,
    MOST_TENSORS,
    check_file,
    read_json,
    write_bytes,
    write_json,
)
from coulomb._support.checks import check_member, packaged
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.attention.layers.base import Seed, as_generator, options_of
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.attention.ops.checks import must_be_traceable

__all__ = ["TransformersAttention", "replace_attention"]

_SETTINGS = ("causal", "dropout", "feature_map", "n_features", "qkv", "start")

_FAMILIES = packaged("coulomb.attention.layers", "families.toml")
_SWAPPED: dict[str, list[str]] = _FAMILIES["swapped"]
MODEL_TYPES: list[str] = _FAMILIES["types"]
ROTARY_TYPES: dict[str, str] = _FAMILIES["rotary"]
PROJECTIONS: dict[str, list[str]] = _FAMILIES["linearised"]


def replace_attention(
    model: nn.Module,
    *,
    select: Callable[[str], bool] | None = None,
    generator: Seed = None,
    **settings: Any,
) -> list[str]:
    """Swap every attention layer of a model for `KernelAttention`, in place.

    Swapped are `torch.nn.MultiheadAttention` and the self-attention of BERT and its kin
    in transformers 5. Weights of the projections are carried over, in torch's layers as
    the very same parameters, so that optimisers keep working; particles are drawn.

    Parameters
    ----------
    model
        Any torch model.
    select
        Receives a layer's name and says whether to swap it; None swaps all.
    generator
        A generator on the CPU or a seed for the particles; None draws from torch's own.
    **settings
        `feature_map`, `n_features`, `qkv`, `start`, `causal` and `dropout` of
        `KernelAttention`; dropout is otherwise that of the layer.

    Returns
    -------
    list of str
        Names of the layers that were swapped.

    Examples
    --------
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> replace_attention(model, feature_map="favor", generator=0)
    ['self_attn']
    >>> model.self_attn
    KernelAttention(
      8, num_heads=2, dropout=0.1, feature_map=Favor(), n_features=256
      ...
    """
    for name in settings:
        check_member("settings", name, _SETTINGS)
    found = {name: m for name, m in model.named_modules() if _is_attention(m)}
    if "" in found:
        raise ParameterError(
            "`model` must contain attention layers; got one itself. Build a "
            "KernelAttention and give it `load_state_dict(..., strict=False)`."
        )
    chosen = [name for name in found if select is None or select(name)]
    if not chosen:
        raise ParameterError(
            "`model` must contain torch.nn.MultiheadAttention or the self-attention of "
            f"{', '.join(n.split('SelfA')[0] for n in _SWAPPED)}; got "
            f"{type(model).__name__} with {len(found)} of them, none selected."
        )
    _swap_by_name(model, {"names": chosen, "generator": generator, **settings})
    if is_pretrained(model):
        as_saveable(model, {"layers": "kernel", "names": chosen, **settings})
    return chosen


def _swap_by_name(model: nn.Module, settings: Mapping[str, Any]) -> None:
    options: dict[str, Any] = {"generator": None, **settings}
    names = options.pop("names")
    options["generator"] = as_generator(options["generator"])
    # Everything is built before anything is swapped: a refusal changes nothing.
    layers = {name: _swapped(model.get_submodule(name), options) for name in names}
    swap_layers(model, layers)


def swap_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Put layers in the places of a model that they are named by."""
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it was decided for another layer


def _is_attention(module: nn.Module) -> bool:
    kind = type(module)
    theirs = kind.__module__.startswith("transformers.")
    return kind is nn.MultiheadAttention or (theirs and kind.__name__ in _SWAPPED)


def _swapped(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    torchs = isinstance(module, nn.MultiheadAttention)
    layer = (_from_torch if torchs else _from_transformers)(module, options)
    return layer.train(module.training)


def _from_torch(module: Any, options: dict[str, Any]) -> nn.Module:
    if module.bias_k is not None or module.add_zero_attn:
        raise ParameterError(
            "`model` must have no MultiheadAttention with add_bias_kv or "
            "add_zero_attn; got one. Leave it out with `select`."
        )
    options = {**options_of(module), **options}
    layer = KernelAttention(module.embed_dim, module.num_heads, **options)
    if layer.qkv == "learned":
        layer.adopt(module)
        return layer
    layer.out_proj = module.out_proj
    weight, bias = module.in_proj_weight, module.in_proj_bias
    value = module.v_proj_weight if weight is None else weight.chunk(3)[2]
    _copy(layer.v_proj_weight, value)
    _copy(layer.v_proj_bias, None if bias is None else bias.chunk(3)[2])
    return layer


def _copy(target: Tensor | None, source: Tensor | None) -> None:
    if target is not None and source is not None:
        with torch.no_grad():
            target.copy_(source)
        target.requires_grad_(source.requires_grad)


def _from_transformers(module: Any, options: dict[str, Any]) -> nn.Module:
    *names, output = _SWAPPED[type(module).__name__]
    query, key, value = (getattr(module, name) for name in names)
    kind = getattr(module, "position_embedding_type", "absolute")
    if query.in_features != query.out_features or kind != "absolute":
        raise ParameterError(
            "`model` must have square projections and absolute positions; got "
            f"{query.in_features} by {query.out_features} and {kind!r} in a "
            f"{type(module).__name__}. Leave it out with `select`."
        )
    dropout = getattr(module, "dropout", None)
    theirs = {
        "dropout": getattr(dropout, "p", getattr(module, "attention_dropout", 0.0)),
        "causal": bool(getattr(module, "is_causal", False)),
        "bias": query.bias is not None,
        "batch_first": True,
        "device": query.weight.device,
        "dtype": query.weight.dtype,
    }
    heads = getattr(module, "num_attention_heads", None) or module.n_heads
    layer = KernelAttention(query.in_features, heads, **{**theirs, **options})
    layer.out_proj = module.get_submodule(output) if output else nn.Identity()
    for name in ("weight", "bias"):
        parts = [getattr(part, name) for part in (query, key, value)]
        if layer.qkv == "shared":
            _copy(getattr(layer, f"v_proj_{name}"), parts[2])
        elif parts[0] is not None:
            _copy(getattr(layer, f"in_proj_{name}"), torch.cat(parts))
    return TransformersAttention(layer)


class TransformersAttention(nn.Module):
    """`KernelAttention` behind the call signature of transformers.

    Examples
    --------
    >>> layer = TransformersAttention(KernelAttention(8, 2, batch_first=True))
    >>> real = torch.tensor([[[[True, True, False]]]])
    >>> layer(torch.ones(1, 3, 8), attention_mask=real)[0].shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, attention: KernelAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend."""
        options = {"past_key_values": past_key_values, **options}
        for name in ("past_key_values", "head_mask", "past_key_value"):
            given = options.get(name)
            if given is not None:
                raise ParameterError(
                    f"`{name}` must be None for linear attention; got "
                    f"{type(given).__name__}. Call the model with use_cache=False."
                )
        padding = _padding(attention_mask, causal=self.attention.causal)
        out, weights = self.attention(
            hidden_states,
            hidden_states,
            hidden_states,
            key_padding_mask=padding,
            need_weights=bool(options.get("output_attentions")),
            average_attn_weights=False,
        )
        return out, weights


def _padding(mask: Tensor | None, *, causal: bool) -> Tensor | None:
    if mask is None:
        return None
    real = real_tokens(mask)
    repeated = mask.dim() == 2 or mask.stride(2) == 0 or mask.shape[2] == 1
    if not repeated and not must_be_traceable(mask):
        seen = _seen(mask)
        rows = torch.ones_like(seen[0, 0])
        expected = real[:, None, None] & (rows.tril() if causal else rows)
        if not torch.equal(seen, expected.expand_as(seen)):
            raise ParameterError(
                "`attention_mask` must hide the same tokens from all queries, or the "
                f"future; got another of shape {tuple(mask.shape)}, which linear "
                "attention cannot express."
            )
    return ~real


def _seen(mask: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min / 4
    return mask.bool()


def real_tokens(mask: Tensor) -> Tensor:
    """Read the padding out of a mask of transformers.

    Examples
    --------
    >>> real_tokens(torch.tensor([[[[0.0, -3e38]]]]))
    tensor([[ True, False]])
    """
    if mask.dim() == 2:
        return mask.bool()
    return _seen(mask[:, 0, -1])  # the last query sees every token


# How the attention of a saved model is built, by the name in its configuration.
LAYERS: dict[str, Callable[[nn.Module, Mapping[str, Any]], None]] = {
    "kernel": _swap_by_name
}


# Models whose padding can be left out; whether their positions begin late.
_PACKED = {"BertModel": False, "RobertaModel": True}
_MOSTLY_REAL = 0.9

_PREFIX, _TYPE = "Linearised", "coulomb-"

# Files beside the weights that still apply, for transformers and its users: those of
# the tokenizer, of sentence-transformers, and the card until there is a new one.
_COMPANIONS = (".jinja", ".json", ".md", ".model", ".txt")
_OURS = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")

_LOADER = "modeling_coulomb"
_LOADER_TEXT = '''"""Classes of this model, from coulomb: pip install 'coulomb[hf]'."""

from coulomb.attention.layers.replace import named_class

'''


def is_pretrained(model: nn.Module) -> bool:
    """Tell whether a model is one of Hugging Face transformers."""
    return _is_model(type(model))


def _is_model(kind: type) -> bool:
    return any(c.__name__ == "PreTrainedModel" for c in kind.__mro__)


def as_saveable(model: Any, settings: dict[str, Any]) -> None:
    """Turn a model into its subclass that is saved with the settings of its layers."""
    config, base = map(_kind, (model.config, model))
    if config.model_type not in MODEL_TYPES:
        return
    model.__class__ = model_class(base)
    linearised = config_of(model.config, settings)
    for part in model.modules():
        if isinstance(getattr(part, "config", None), config):
            part.config = linearised


def _kind(instance: Any) -> Any:
    return type(instance)


def config_of(config: Any, settings: dict[str, Any]) -> Any:
    """Copy a configuration into its subclass."""
    values = config.to_dict()
    values.pop("model_type", None)
    copied = config_class(_kind(config))(**values, coulomb=settings)
    copied._attn_implementation_internal = config._attn_implementation_internal
    return copied


@cache
def config_class(base: Any) -> Any:
    """Make the subclass of a configuration that says how attention is built."""

    def __init__(self: Any, *values: Any, **named: Any) -> None:
        named.setdefault("coulomb", {})
        base.__init__(self, *values, **named)
        register_models(_kind(self))

    body = {
        "__doc__": base.__doc__,
        "__init__": __init__,
        "__module__": __name__,
        "model_type": _TYPE + base.model_type,
    }
    return type(_PREFIX + base.__name__, (base,), body)


@cache
def model_class(base: Any) -> Any:
    """Make the subclass of a model whose attention its configuration describes."""

    def __init__(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, config, *arguments, **options)
        settings = dict(config.coulomb)
        LAYERS[settings.pop("layers", "heads")](self, settings)

    @wraps(base.forward)
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        # Where positions are given, texts may follow one another in a row.
        count = None if named.get("position_ids") is not None else n_positions(self)
        if count is not None and isinstance(ids, Tensor) and ids.shape[-1] > count:
            raise ParameterError(
                f"`input_ids` must have at most {count} tokens, as many as this model "
                f"has positions; got {ids.shape[-1]}. Cut the text, or linearise the "
                "source again with a larger `max_length`."
            )
        packed = _packed(self, named) if not arguments else None
        if packed is None:
            return base.forward(self, *arguments, **named)
        out = base.forward(self, **packed)
        real = packed["packed"]
        hidden = out.last_hidden_state
        spread = hidden.new_zeros(*real.shape, hidden.shape[-1])
        spread[real] = hidden[0]
        out["last_hidden_state"] = spread
        if out.get("pooler_output") is not None:
            out["pooler_output"] = self.pooler(spread)
        return out

    def save_pretrained(self: Any, save_directory: Any, **options: Any) -> None:
        folder, push = Path(save_directory), options.pop("push_to_hub", False)
        repository = options.pop("repo_id", folder.name)
        _check_saveable(self.config.coulomb)
        self.config.auto_map = _auto_map(self.config)
        base.save_pretrained(self, folder, **options)
        _write_companions(self, folder)
        if push:
            self.push_to_hub(repository)

    def push_to_hub(self: Any, repo_id: str, **options: Any) -> Any:
        # transformers' own would write its empty card over the model's.
        from huggingface_hub import HfApi

        api = HfApi(token=options.pop("token", None))
        private = options.pop("private", None)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)

    body = {
        "__doc__": f"`{base.__name__}` with linear attention.",
        "__init__": __init__,
        "__module__": __name__,
        "config_class": config_class(base.config_class),
        "forward": forward,
        "packs_padding": True,
        "push_to_hub": push_to_hub,
        "save_pretrained": save_pretrained,
    }
    return type(_PREFIX + base.__name__, (base,), body)


def _packed(model: Any, named: Mapping[str, Any]) -> dict[str, Any] | None:
    """Leave the padding of a batch out, where much of it is padding.

    All texts become one, with the positions that they had; `packed` tells the attention
    function which tokens are of one text.
    """
    ids, mask = named.get("input_ids"), named.get("attention_mask")
    first = _PACKED.get(type(model).__name__.removeprefix(_PREFIX))
    if first is None or ids is None or mask is None or mask.shape != ids.shape:
        return None
    known = {"input_ids", "attention_mask", "token_type_ids"}
    if not model.packs_padding or set(named) - known:
        return None
    if model.config._attn_implementation != "coulomb":
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if float(mask.sum()) > _MOSTLY_REAL * mask.numel():
        return None
    real = mask.bool()
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if first:  # counted from the first token that is no padding
        there = ids.ne(model.config.pad_token_id).long()
        places = there.cumsum(dim=1) * there + model.config.pad_token_id
    given = {name: x for name, x in named.items() if name != "attention_mask"}
    given |= {"position_ids": places}
    return {name: x[real].unsqueeze(0) for name, x in given.items()} | {"packed": real}


def n_positions(model: Any) -> int | None:
    """Tell how long texts may be at most; None if there is no limit."""
    config = getattr(model, "config", None)
    count = getattr(config, "max_position_embeddings", None)
    kind = str(getattr(config, "model_type", "")).removeprefix(_TYPE)
    if count is None or kind in ROTARY_TYPES:
        return None
    return int(count) - (2 if kind in _FAMILIES["begin_late"] else 0)


def named_class(name: str) -> Any:
    """Give a class of a saved model by the name that its folder has for it."""
    import transformers

    base = getattr(transformers, name.removeprefix(_PREFIX))
    return (model_class if _is_model(base) else config_class)(base)


class _Configs(dict[str, Any]):
    """Configurations that are registered; ours are made when one is asked for.

    transformers imports its own only then too, and cannot do it while it is imported.
    """

    def __contains__(self, key: object) -> bool:
        ours = str(key).removeprefix(_TYPE) in MODEL_TYPES
        return super().__contains__(key) or (ours and str(key).startswith(_TYPE))

    def __missing__(self, key: str) -> Any:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self[key] = config_class(CONFIG_MAPPING[key.removeprefix(_TYPE)])
        return self[key]


@cache
def register_configs() -> None:
    """Teach transformers the configurations, without importing models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING._extra_content = _Configs(CONFIG_MAPPING._extra_content)


@cache
def register_models(config: Any) -> None:
    """Teach transformers the models of a configuration."""
    for auto, base in _auto_classes(config):
        auto.register(config, model_class(base), exist_ok=True)


def _auto_classes(config: Any) -> Iterator[tuple[Any, Any]]:
    import transformers

    for task in _FAMILIES["tasks"]:
        auto = getattr(transformers, task)
        base = auto._model_mapping.get(config.__base__, None)
        if base is not None:
            yield auto, base


def _auto_map(config: Any) -> dict[str, str]:
    names = {"AutoConfig": type(config).__name__}
    for auto, base in _auto_classes(type(config)):
        names[auto.__name__] = _PREFIX + base.__name__
    return {auto: f"{_LOADER}.{name}" for auto, name in names.items()}


def _check_saveable(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ParameterError(
                f"`{name}` must be given by its name for a model that is saved; got "
                f"{value!r}. Call replace_attention with {name}='...'."
            ) from error


def _write_companions(model: Any, folder: Path) -> None:
    """Write what loads the model, its card, and what of its source still applies."""
    names = sorted(set(model.config.auto_map.values()))
    classes = (name.partition(".")[2] for name in names)
    lines = (f'{name} = named_class("{name}")\n' for name in classes)
    text = _LOADER_TEXT + "".join(lines)
    write_bytes(folder / f"{_LOADER}.py", text.encode())
    source = _source_folder(str(model.name_or_path))
    if source is not None and source.resolve() != folder.resolve():
        for name in _companions(source):
            target = folder / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                most = MOST_TENSORS if target.suffix == ".safetensors" else MOST_JSON
                shutil.copyfile(check_file(source / name, most), target)
    before = None if source is None else read_json(source / "config.json", finite=False)
    key = "max_position_embeddings"
    if before is not None and before.get(key) != getattr(model.config, key, None):
        for name, length in _FAMILIES["lengths"].items():
            if (folder / name).exists():
                known = read_json(folder / name, finite=False)
                write_json(folder / name, known | {length: n_positions(model)})
    summary = getattr(model, "linearise_summary", None)
    if source is None or not (source / f"{_LOADER}.py").exists() or summary:
        card = _card(model, source, summary)
        write_bytes(folder / "README.md", card.encode())


def _source_folder(name: str) -> Path | None:
    """Find the folder that a model was loaded from, or its copy in the cache."""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    try:
        found = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def _companions(source: Path) -> list[str]:
    """List the files that come along: the tokenizer's, and those of modules.json."""
    files = sorted(p for p in source.iterdir() if p.is_file())
    names = [p.name for p in files if p.suffix in _COMPANIONS and p.name not in _OURS]
    if "modules.json" in names:
        modules = read_json(source / "modules.json")
        for module in modules if isinstance(modules, list) else []:
            path = module.get("path") if isinstance(module, dict) else None
            inside = PurePosixPath(str(path or ""))
            if ".." in inside.parts or inside.is_absolute():
                raise FileFormatError(
                    f"{source / 'modules.json'}: {path!r} is not inside the model."
                )
            if path:
                within = sorted((source / inside).glob("*"))
                within = [p for p in within if p.suffix in (".json", ".safetensors")]
                names += [str(inside / p.name) for p in within if p.is_file()]
    return names


def _card(model: Any, folder: Path | None, summary: Any) -> str:
    """Write the model card: source, recipe, what was kept, limits."""
    source = str(model.name_or_path) or type(model).__name__
    name = Path(source).name
    if not re.fullmatch(r"[\w. -]+", name):  # it may be a stranger's
        name = json.dumps(name)
    of_sentences = folder is not None and (folder / "modules.json").is_file()
    header = {
        "base_model": name,
        "library_name": "sentence-transformers" if of_sentences else "transformers",
        "pipeline_tag": "sentence-similarity" if of_sentences else "feature-extraction",
        "tags": "[coulomb, linear-attention]",
    }
    old = None if folder is None else folder / "README.md"
    if old is not None and old.is_file():
        text = check_file(old, MOST_JSON).read_text(encoding="utf-8", errors="replace")
        licence = re.search(r"^license: *([\w.-]+)$", text[:5000], re.MULTILINE)
        header |= {} if licence is None else {"license": licence[1]}
    recipe = "Particles were drawn, not learned, unless it was trained since."
    if summary is not None:
        recipe = f"Particles were learned without labels.\n\n```\n{summary}\n```"
    count = n_positions(model)
    limits = f"Texts of at most {count} tokens." if count else "None is known."
    if exact := getattr(model.config, "coulomb", {}).get("exact_length"):
        limits += f" Those of at most {exact} attend by softmax, as the original does."
    template = (files("coulomb.attention.layers") / "card.md").read_text(
        encoding="utf-8"
    )
    return template.format(
        header="\n".join(f"{key}: {value}" for key, value in header.items()),
        name=name, source=name, recipe=recipe, limits=limits, loader=_LOADER,
    )  # fmt: skip
