"""The teacher: a softmax encoder, the texts it reads, and what its layers see of them.

An encoder is a stack of blocks that can be run one at a time. The blocks are called as
the model calls them: what the first one receives beside the hidden states (masks,
position biases) is caught once per batch and used for all.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.errors import (
    CoulombError,
    ParameterError,
    ParameterTypeError,
    shown,
)
from coulomb._support.ranks import ALONE, Ranks
from coulomb.attention import AbstractAttention
from coulomb.attention.layers.replace import (
    PROJECTIONS,
    ROTARY_TYPES,
    is_pretrained,
    n_positions,
    real_tokens,
)
from coulomb.linearise.heads import softmax_rows

if TYPE_CHECKING:
    from coulomb.linearise.fit import LineariseSettings

FAMILIES = "BERT, DistilBERT, MPNet, RoBERTa"
MODEL_TYPES = ("bert", "roberta", "distilbert", "mpnet")

_LONGEST = 512

# The teacher's hidden states of all blocks; those of more texts are made again.
_KEPT_BYTES = 3 << 27

# A text of a plain function's tokenizer has about one token for so many characters.
_CHARACTERS = 4

Batch = Mapping[str, Tensor]
Tokenizer = Callable[..., Any]


class Rows(NamedTuple):
    """Queries, keys and values of some sequences, as the teacher makes them."""

    q: Tensor  # (batch, heads, n, dim), the queries that are compared
    k: Tensor  # (batch, heads, m, dim)
    v: Tensor  # (batch, heads, m, dim_v)
    query_mask: Tensor  # (batch, n)
    key_mask: Tensor  # (batch, m)
    bias: Tensor | None = None  # (batch or 1, heads, n, m)
    places: Tensor | None = None  # (n,), positions of the queries; None for all

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, which keys are real, and where the queries are."""
        return self.q, self.k, self.key_mask, self.places

    def softmax(self) -> Tensor:
        """Write out softmax attention, shape `(batch, heads, n, m)`."""
        return softmax_rows(self.q, self.k, self.key_mask, self.bias)

    def mean(self, values: Tensor) -> Tensor:
        """Average over real queries."""
        weights = self.query_mask.unsqueeze(1).to(values.dtype)
        return (values * weights).sum(dim=(0, 2)) / weights.sum().clamp_min(1)

    def some_queries(self, count: int, *, generator: torch.Generator) -> "Rows":
        """Keep some of the queries, the same of each sequence."""
        n = self.q.shape[2]
        if n <= count:
            return self
        chosen = torch.randperm(n, generator=generator)[:count]
        bias = None if self.bias is None else self.bias[:, :, chosen]
        mask = self.query_mask[:, chosen]
        q, places = self.q[:, :, chosen], chosen.to(self.q.device)
        return self._replace(q=q, query_mask=mask, bias=bias, places=places)


# What a block is called with beside the hidden states, by the kind of block.
Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class Site:
    """One attention layer of an encoder that sees the whole text."""

    name: str
    module: nn.Module
    block: int  # the number of its block

    @property
    def num_heads(self) -> int:
        """How many heads it has."""
        names = ("num_attention_heads", "n_heads", "num_heads")
        places = (self.module, getattr(self.module, "config", None))
        found = (getattr(place, name, None) for place in places for name in names)
        return int(next(filter(None, found)))

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Make queries, keys and values, each `(batch, n, heads * dim)`."""
        module: Any = self.module
        names = PROJECTIONS.get(type(module).__name__)
        if names is None:  # torch projects inside its layer
            joint = functional.linear(x, module.in_proj_weight, module.in_proj_bias)
            return joint.chunk(3, dim=-1)
        parts = [getattr(module, name)(x) for name in names]
        return parts if len(parts) == 3 else parts[0].chunk(3, dim=-1)

    def rotate(self, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        """Turn queries and keys by their positions, as the layer does."""
        if angles is None:
            return q, k
        home = sys.modules[type(self.module).__module__]
        rotated: tuple[Tensor, Tensor] = home.apply_rotary_pos_emb(q, k, *angles)
        return rotated


def is_attention(module: nn.Module) -> bool:
    """Tell whether a module is self-attention that can be linearised, or was."""
    if isinstance(module, AbstractAttention):
        return hasattr(module, "coulomb")
    kind = type(module)
    ours_or_theirs = kind.__module__.startswith(("transformers.", "coulomb."))
    known = ours_or_theirs and kind.__name__ in PROJECTIONS
    return known or kind is nn.MultiheadAttention


class _Reached(Exception):
    """Ends a call of the model when its blocks were reached."""


class Stack(nn.Module):
    """The blocks of an encoder, run one after the other.

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> stack = Stack(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    >>> [site.name for site in stack.sites]
    ['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn']
    """

    model: nn.Module  # the encoder the blocks belong to

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        name, self.blocks = _find_blocks(model)
        # Hidden from torch: its parameters are not the stack's.
        vars(self)["model"] = model
        # Layers that see a window of the text are linear already.
        self.sites = [
            Site(f"{name}.{number}.{inner}", module, number)
            for number, block in enumerate(self.blocks)
            for inner, module in block.named_modules()
            if is_attention(module) and not getattr(module, "sliding_window", None)
        ]
        owner = model.get_submodule(name.rpartition(".")[0])
        self.last_norm: nn.Module = getattr(owner, "final_norm", nn.Identity())

    @property
    def has_bias(self) -> bool:
        """Whether a bias of relative positions is added to the scores."""
        return "MPNet" in type(self.sites[0].module).__name__

    @property
    def batch_first(self) -> bool:
        """Whether hidden states are `(batch, n, dim)`."""
        return bool(getattr(self.sites[0].module, "batch_first", True))

    def begin(self, batch: Batch) -> tuple[Tensor, Calls]:
        """Call the model until blocks of every kind were called, and give the input."""
        calls: Calls = {}
        begun: list[Tensor] = []
        kinds = {_kind(block) for block in self.blocks}

        def keep(block: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> None:
            keywords = dict(keywords)
            if not arguments:
                first = next(iter(inspect.signature(block.forward).parameters))
                arguments = (keywords.pop(first),)
            begun.append(arguments[0])
            calls.setdefault(_kind(block), (arguments[1:], keywords))
            if len(calls) == len(kinds):
                raise _Reached

        try:
            vars(self.model)["packs_padding"] = False  # blocks are to see the batch
            with _hooked(self.blocks, keep):
                self.call(batch)
        except _Reached:
            return begun[0], calls
        finally:
            del vars(self.model)["packs_padding"]
        raise ParameterError(
            "`model` must call its own blocks; got "
            f"{type(self.model).__name__}, which called none of them."
        )

    def call(self, batch: Batch) -> Any:
        """Call the whole model."""
        with _no_fast_path():
            return self.model(**self._on_device(batch))

    def _on_device(self, batch: Batch) -> Batch:
        place = next(self.model.parameters()).device
        return {name: value.to(place) for name, value in batch.items()}

    def run_block(self, number: int, hidden: Tensor, calls: Calls) -> Tensor:
        """Call one block, and after the last the norm that follows it."""
        arguments, keywords = calls[_kind(self.blocks[number])]
        with _no_fast_path():
            out = self.blocks[number](hidden, *arguments, **keywords)
        out = out[0] if isinstance(out, tuple) else out
        return self.last_norm(out) if number == len(self.blocks) - 1 else out

    def record_block(
        self, site: Site, hidden: Tensor, calls: Calls
    ) -> tuple[Rows, Tensor]:
        """Call the block of a layer, and keep what the layer compares."""
        received: dict[str, Any] = {}

        def keep(layer: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> None:
            signature = inspect.signature(layer.forward)
            received.update(signature.bind_partial(*arguments, **keywords).arguments)

        with _hooked([site.module], keep):
            after = self.run_block(site.block, hidden, calls)
        x, key_mask = _tokens_received(site.module, received)
        shape = (*x.shape[:2], site.num_heads, -1)
        # Head after head: one product evaluates the features of a head's tokens.
        q, k, v = (
            part.view(shape).movedim(2, 0).contiguous().transpose(0, 1)
            for part in site.project(x)
        )
        q, k = site.rotate(q, k, received.get("position_embeddings"))
        bias = received.get("position_bias")
        return Rows(q, k, v, key_mask, key_mask, bias), after

    def forward(self, hidden: Tensor, calls: Calls) -> list[Tensor]:
        """Call all blocks, and give `(batch, n, dim)` after each."""
        states = []
        for number in range(len(self.blocks)):
            hidden = self.run_block(number, hidden, calls)
            states.append(self.batch_major(hidden))
        return states

    def batch_major(self, hidden: Tensor) -> Tensor:
        """View hidden states as `(batch, n, dim)`."""
        return hidden if self.batch_first else hidden.transpose(0, 1)

    def tokens(self, batch: Batch) -> Tensor:
        """Tell which tokens of a batch are real."""
        if "attention_mask" in batch:
            return self._on_device(batch)["attention_mask"].bool()
        return self.record_block(self.sites[0], *self.begin(batch))[0].key_mask


@contextmanager
def _hooked(modules: Iterable[nn.Module], keep: Callable[..., None]) -> Iterator[None]:
    """Have the calls of some modules seen for a while."""
    handles = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kind(block: nn.Module) -> str:
    """Blocks of one kind are called alike; local and global ones are not."""
    return str(getattr(block, "attention_type", ""))


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(sum(map(is_attention, b.modules())) == 1 for b in module)
    ]
    if len(found) != 1:
        raise ParameterError(
            "`model` must be an encoder with one list of blocks that have one "
            f"attention layer each, torch's or that of {FAMILIES}; got "
            f"{type(model).__name__} with {len(found)} such lists."
        )
    return found[0]


def _tokens_received(
    module: nn.Module, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Find the inputs `(batch, n, dim)`, and which of them are real tokens."""
    if isinstance(module, nn.MultiheadAttention | AbstractAttention):
        if arguments.get("attn_mask") is not None or arguments.get("is_causal"):
            raise ParameterError(
                "`model` must be an encoder whose tokens all see each other; got a "
                "layer that is called with `attn_mask`."
            )
        x = arguments["query"]
        x = x if module.batch_first else x.transpose(0, 1)
        mask = arguments.get("key_padding_mask")
        if mask is not None:
            mask = ~(mask < 0 if mask.is_floating_point() else mask)
    else:
        x, mask = arguments["hidden_states"], arguments.get("attention_mask")
        mask = None if mask is None else real_tokens(mask)
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return x, mask.expand(x.shape[:2])


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Keep torch's encoder layers from going around their attention layer.

    What is wrong with a call of the model is told as what is wrong with its inputs.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CoulombError):
            raise
        raise ParameterError(
            "`tokenizer` must return what the model can be called with; the call "
            f"failed with {shown(str(error))}."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def as_teacher(model: nn.Module) -> Stack:
    """Find the blocks of an encoder with softmax attention."""
    if not isinstance(model, nn.Module):
        raise ParameterTypeError(
            f"`model` must be a torch module; got {type(model).__name__}. Load a saved "
            "one with transformers.AutoModel.from_pretrained."
        )
    config: Any = model.config if is_pretrained(model) else None
    kind = str(getattr(config, "model_type", ""))
    if kind.startswith("coulomb-"):
        raise ParameterError(
            "`model` must have softmax attention; got one that is linearised already."
        )
    if config is not None and kind not in (*MODEL_TYPES, *ROTARY_TYPES):
        raise ParameterError(
            f"`model` must be of one of the families {FAMILIES}, "
            f"{', '.join(ROTARY_TYPES.values())}, or an encoder of "
            f"torch.nn.MultiheadAttention; got {type(model).__name__}."
        )
    if getattr(config, "is_decoder", False):
        raise ParameterError("`model` must be an encoder; got is_decoder=True.")
    return Stack(model)


@dataclass(eq=False)
class Recording:
    """What the blocks of an encoder make of some batches, one block after the other.

    Hidden states are kept of as many batches as there is room for. Of several processes
    each has some texts of every batch; of a batch with fewer texts all have all.
    """

    stack: Stack
    batches: Sequence[Batch]
    n_texts: int = 0
    most_bytes: int = _KEPT_BYTES
    kept: list[list[Tensor]] = field(default_factory=list)
    ranks: Ranks = ALONE
    counts: list[int] = field(init=False)  # texts of each batch, of all processes

    def __post_init__(self) -> None:
        self.counts = [len(next(iter(batch.values()))) for batch in self.batches]
        self.batches = [
            {name: x[self.ranks.block(count)] for name, x in batch.items()}
            if count >= self.ranks.world > 1
            else batch
            for batch, count in zip(self.batches, self.counts, strict=True)
        ]

    def whole(self, number: int, x: Tensor) -> Tensor:
        """Put the rows of a batch together that are with several processes."""
        return x if len(x) == self.counts[number] else self.ranks.gather(x)

    @torch.no_grad()
    def layers(self) -> Iterator[list[Rows]]:
        """Run block after block on all batches, and give what its attention compares.

        Only the hidden states between two blocks have to be held. Every process gives
        the rows of all.
        """
        states = [self.stack.begin(batch) for batch in self.batches]
        n_blocks = len(self.stack.blocks)
        sizes = accumulate(n_blocks * hidden.nbytes for hidden, _ in states)
        self.kept = [[] for size in sizes if size <= self.most_bytes]
        sites = {site.block: site for site in self.stack.sites}
        for number in range(n_blocks):
            rows = []
            for i, (hidden, calls) in enumerate(states):
                if number in sites:
                    site = sites[number]
                    seen, hidden = self.stack.record_block(site, hidden, calls)
                    if seen.bias is not None:
                        bias = seen.bias.expand(len(seen.q), -1, -1, -1)
                        seen = seen._replace(bias=bias)
                    whole = (None if x is None else self.whole(i, x) for x in seen)
                    rows.append(Rows._make(whole))
                else:
                    hidden = self.stack.run_block(number, hidden, calls)
                states[i] = hidden, calls
                if i < len(self.kept):
                    self.kept[i].append(self.stack.batch_major(hidden))
            if rows:
                yield rows

    @torch.no_grad()
    def states(self, number: int) -> list[Tensor]:
        """Give the hidden states of a batch after every block, or make them again."""
        if number < len(self.kept) and len(self.kept[number]) == len(self.stack.blocks):
            return self.kept[number]
        return list(self.stack(*self.stack.begin(self.batches[number])))


def record_texts(
    teacher: Stack,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    settings: "LineariseSettings",
    *,
    generator: torch.Generator,
    ranks: Ranks = ALONE,
) -> tuple[Recording, Recording]:
    """Draw texts, hold a tenth out, join some to long ones, and cut into batches.

    The first are to learn from, the second to look at.
    """
    told = type(texts).__name__
    if isinstance(texts, Iterable) and not isinstance(texts, str):
        texts = list(texts)
        odd = [shown(text) for text in texts if not isinstance(text, str)]
        told = f"{odd[0]} in it" if odd else ""
    if told:
        raise ParameterTypeError(f"`texts` must be a sequence of strings; got {told}.")
    if not callable(tokenizer):
        raise ParameterTypeError(
            "`tokenizer` must be a tokenizer of transformers or a function of a list "
            f"of texts; got {type(tokenizer).__name__}."
        )
    texts = [text for text in texts if text.strip()]
    if len(texts) < 4:
        raise ParameterError(
            f"`texts` must have at least 4 texts that are not blank; got {len(texts)}."
        )
    max_length = settings.max_length or longest_text(teacher.model)
    order = torch.randperm(len(texts), generator=generator).tolist()
    sizes = _sizes(tokenizer, [texts[i] for i in order], max_length)
    kept: list[tuple[str, int]] = []
    room = settings.max_tokens
    for i, size in zip(order, sizes, strict=True):
        if not kept or size <= room:
            kept.append((texts[i], size))
            room -= size
    if len(kept) < 4:
        raise ParameterError(
            "`max_tokens` must have room for four texts at least; got "
            f"{settings.max_tokens} for texts of up to {max(sizes)} tokens."
        )
    n_held = max(1, len(kept) // 10)
    recordings = []
    for part in (kept[n_held:], kept[:n_held]):
        mixed = _with_long_texts(part, max_length, settings.long_share)
        groups = _group_by_length(mixed, settings.batch_tokens)
        batches = [encode(tokenizer, group, max_length) for group in groups]
        recordings.append(Recording(teacher, batches, len(part), ranks=ranks))
    if not settings.distil_steps:
        recordings[0].most_bytes = 0  # nobody will ask for its states
    return recordings[0], recordings[1]


def longest_text(model: Any) -> int:
    """Tell how long texts may be that are learned from."""
    return min(_LONGEST, n_positions(model) or _LONGEST)


@torch.no_grad()
def with_positions(model: Any, count: int) -> Any:
    """Copy an encoder with learned positions for longer texts, repeated from its own.

    Texts that it could read before it reads as before.
    """
    before = n_positions(model)
    if before is None or count <= before:
        return model
    longer = copy.deepcopy(model)
    owner = next(m for m in longer.modules() if hasattr(m, "position_embeddings"))
    table = owner.position_embeddings
    first = table.num_embeddings - before
    rows = torch.cat([torch.arange(first), first + torch.arange(count) % before])
    size, weight = (len(rows), table.embedding_dim), table.weight[rows]
    owner.position_embeddings = nn.Embedding(
        *size, padding_idx=table.padding_idx, _weight=weight
    )
    for name, old in owner.named_buffers():
        new = torch.arange(len(rows), device=old.device).expand(1, -1)
        new = new if name == "position_ids" else torch.zeros_like(new)
        owner.register_buffer(name, new, persistent=False)
    longer.config.max_position_embeddings = len(rows)
    return longer


def _is_pretrained_tokenizer(tokenizer: Tokenizer) -> bool:
    return hasattr(tokenizer, "pad") and hasattr(tokenizer, "model_max_length")


def _sizes(tokenizer: Tokenizer, texts: list[str], max_length: int) -> list[int]:
    if not _is_pretrained_tokenizer(tokenizer):
        return [min(max_length, 2 + len(text) // _CHARACTERS) for text in texts]
    options = {"truncation": True, "max_length": max_length, "padding": False}
    try:
        ids = tokenizer(texts, **options)
    except BaseException as error:
        # A panic is no Exception; a signal is neither.
        if type(error).__name__ != "PanicException":
            raise
        if len(texts) > 1:  # find the text
            return [_sizes(tokenizer, [text], max_length)[0] for text in texts]
        told = " ".join(str(error).split())[:200]
        raise ParameterError(
            f"`texts` must be texts that the tokenizer can cut; it fails on "
            f"{shown(texts[0])}: {told}. Leave it out, or use another tokenizer."
        ) from None
    return [len(row) for row in ids["input_ids"]]


def _with_long_texts(
    part: list[tuple[str, int]], max_length: int, share: float
) -> list[tuple[str, int]]:
    """Join short texts until long ones have their share of the tokens."""
    long = [pair for pair in part if pair[1] > max_length // 4]
    short = [pair for pair in part if pair[1] <= max_length // 4]
    missing = share * sum(size for _, size in part) - sum(size for _, size in long)
    joined = []
    while missing > 0 and len(short) > 1:
        words, length = short.pop()
        while short and length < max_length:
            text, size = short.pop()
            words, length = f"{words} {text}", length + size
        joined.append((words, min(length, max_length)))
        missing -= length
    return short + long + joined


def _group_by_length(part: list[tuple[str, int]], batch_tokens: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for text, size in sorted(part, key=lambda pair: pair[1]):
        if groups[-1] and (len(groups[-1]) + 1) * size > batch_tokens:
            groups.append([])
        groups[-1].append(text)
    return groups


def encode(tokenizer: Tokenizer, texts: list[str], max_length: int) -> Batch:
    """Make the keyword arguments of the model for some texts."""
    if not _is_pretrained_tokenizer(tokenizer):
        made = tokenizer(texts)
        first = next(iter(made.values()), None) if isinstance(made, Mapping) else None
        if not isinstance(first, Tensor) or first.shape[:1] != (len(texts),):
            raise ParameterTypeError(
                "`tokenizer` must return the keyword arguments of the model as a "
                "mapping, the first of them a tensor with a row for each text; got "
                f"{shown(made)}."
            )
        return dict(made)
    options = {"truncation": True, "max_length": max_length, "padding": True}
    return dict(tokenizer(texts, return_tensors="pt", **options))
