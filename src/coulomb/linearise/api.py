"""Linearise an encoder: record, fit layer by layer, distil, and say what was kept.

`kernel_table` only looks: how well features of one kind or another give the softmax
attention of each layer.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.archive import read_archive, write_archive
from coulomb._support.checks import (
    check_count,
    check_member,
    check_seed,
    make_generator,
)
from coulomb._support.errors import (
    FileFormatError,
    ParameterError,
    ParameterTypeError,
)
from coulomb._support.progress import progress_bar
from coulomb._support.ranks import ALONE, Ranks
from coulomb.attention.layers.base import in_mode
from coulomb.attention.layers.replace import is_pretrained, n_positions, swap_layers
from coulomb.features import (
    DEFAULT_MAP,
    SOFTMAX_KERNEL_MAP,
    CustomMap,
    Particles,
    projections,
)
from coulomb.linearise.fit import (
    LayerFit,
    LineariseSettings,
    OutputError,
    RowDivergence,
    distil,
    fit_layer,
    orthogonal_favor,
    pool,
)
from coulomb.linearise.heads import (
    HeadParticles,
    LinearisedAttention,
    LinearisedHeads,
    as_positive_map,
    check_places,
    untilted,
)
from coulomb.linearise.huggingface import use_int8, with_linearised_heads
from coulomb.linearise.teacher import (
    FAMILIES,
    Batch,
    Recording,
    Rows,
    Stack,
    Tokenizer,
    as_teacher,
    longest_text,
    record_texts,
    with_positions,
)

_FORMAT = "coulomb-linearise-1"
_FITTED = LayerFit._fields[:-1]  # the tensors
_SHOWN = (128, 512, 2048, 8192)  # tokens of texts that are timed, if they are read
_LONGEST_SHOWN = 2048  # where there is no limit
_STEP_OF_ALL = 7  # one takes the time of about so many steps of every layer
_ROWS = 32  # of each text, that `kernel_table` compares

KeepExact = int | Sequence[int | tuple[int, int]]


@dataclass
class LineariseReport:
    """What was kept of an encoder, measured on text its particles were not moved by.

    Parameters
    ----------
    feature_map, n_features
        Of every head.
    exact_heads
        For each layer, the heads that keep softmax.
    before, after, random
        For each layer, the mean KL of attention rows from the teacher's: at the start,
        learned, and of FAVOR+ with as many orthogonal random features.
    head_divergence
        For each layer and head, the KL after learning.
    cosine, cosine_start, cosine_random, cosine_int8
        Mean cosine of embeddings with the teacher's; the last with eight-bit integers.
    n_texts, n_held_out
        Texts that were drawn, and those of them that were only looked at.
    seconds
        Processor time of learning.
    speed
        For each length, seconds of the softmax encoder and of this one.
    """

    feature_map: str
    n_features: int
    exact_heads: list[list[int]]
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    random: list[float] = field(default_factory=list)
    head_divergence: list[list[float]] = field(default_factory=list)
    cosine: float = float("nan")
    cosine_start: float = float("nan")
    cosine_random: float = float("nan")
    cosine_int8: float | None = None
    n_texts: int = 0
    n_held_out: int = 0
    seconds: float = 0.0
    speed: dict[int, tuple[float, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Give the numbers as plain data for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        exact = sum(map(len, self.exact_heads))
        lines = [
            f"{self.feature_map}, {self.n_features} features per head"
            + (f", {exact} heads exact" if exact else "")
            + f"; {self.n_texts} texts ({self.n_held_out} held out), "
            f"{self.seconds:.0f} s of processor time",
            f"cosine with the softmax embedding, held out: {self.cosine:.4f} "
            f"(start {self.cosine_start:.4f}, random features "
            f"{self.cosine_random:.4f}"
            + (f", eight bits {self.cosine_int8:.4f})" if self.cosine_int8 else ")"),
            "layer   KL start   learned    random",
        ]
        rows = zip(self.before, self.after, self.random, strict=True)
        for number, (before, after, random) in enumerate(rows):
            lines.append(f"{number:5d}{before:11.4f}{after:10.4f}{random:10.4f}")
        for length, (slow, fast) in self.speed.items():
            lines.append(
                f"{length:5d} tokens: {1e3 * slow:.0f} ms with softmax, "
                f"{1e3 * fast:.0f} ms linear, {slow / fast:.2f} times as fast"
            )
        return "\n".join(lines)


@torch.no_grad()
def cosine_with(texts: Recording, student: Stack, pooling: str | None) -> float:
    """Average the cosine of an encoder's embeddings with the teacher's, over texts."""
    cosines: list[Tensor] = []
    for number, batch in enumerate(texts.batches):
        mask = student.tokens(batch)
        ends = [texts.states(number)[-1], student(*student.begin(batch))[-1]]
        theirs, ours = (pool(end, mask, pooling or "mean") for end in ends)
        cosines.append(texts.whole(number, (theirs * ours).sum(dim=-1)))
    return float(torch.cat(cosines).mean())


@torch.no_grad()
def measure_speed(
    teacher: Stack,
    student: Stack,
    batch: Batch,
    lengths: Sequence[int],
    *,
    repeats: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> dict[int, tuple[float, float]]:
    """Time both encoders on one text without padding, repeated to each length.

    The two take turns; the best of the repeats counts.
    """
    first = {name: value[:1] for name, value in batch.items()}
    count = int(teacher.tokens(first).sum())
    speed = {}
    for length in lengths:
        places = torch.arange(length) % count
        text = {name: x.index_select(1, places) for name, x in first.items()}
        best = [float("inf"), float("inf")]
        for turn in range(repeats + 1):
            for which, stack in enumerate((teacher, student)):
                begun = clock()
                stack.call(text)
                if turn:  # the first warms up
                    best[which] = min(best[which], clock() - begun)
        speed[length] = (best[0], best[1])
    return speed


def linearise(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    keep_exact: KeepExact = (),
    seed: int = 0,
    settings: LineariseSettings | None = None,
    measure: bool = True,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
    ranks: Ranks = ALONE,
    **options: Any,
) -> nn.Module:
    """Learn linear attention for a pretrained encoder, without labels.

    The particles of every head learn `KL(p_i || s_i)` between the rows of softmax and
    of linear attention, layer by layer, on what the layers of the pretrained model see
    of a few hundred texts; then all of them move together for some steps, so that
    hidden states agree. No other weight changes.

    Parameters
    ----------
    model
        A BERT, RoBERTa, DistilBERT, MPNet, ModernBERT, NomicBERT, GTE or Jina v3 of
        transformers, with any head; or a torch encoder with
        `torch.nn.MultiheadAttention`. It is left as it is.
    tokenizer
        The tokenizer of the model, or a function of a list of texts that returns the
        keyword arguments of the model.
    texts
        Unlabelled texts like those the model will read, some hundred.
    keep_exact
        Layers, or pairs of a layer and a head, that keep softmax and its cost; or how
        many heads to keep, those that are learned worst.
    seed
        Of everything that is drawn.
    settings
        How to learn; None for the defaults.
    measure
        Whether to time both encoders for the summary.
    progress
        Show a bar; None shows it on a terminal.
    checkpoint
        A file for the layers that are learned. Where it is there already, of the same
        model, texts and settings, they are not learned again, and the result is the
        same to the bit.
    ranks
        Processes that share the work, `Ranks.join()` under `torchrun`: each calls this
        with the same arguments and gets the model. Only the first writes the checkpoint
        and measures the speed.
    **options
        Settings by name, such as `feature_map`, `n_features` or `objective`; see
        `LineariseSettings`.

    Returns
    -------
    torch.nn.Module
        The same kind of model, in evaluation mode, with `linearise_summary`.

    Examples
    --------
    >>> encoder = nn.TransformerEncoder(
    ...     nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1
    ... )
    >>> def tokenizer(texts):
    ...     return {"src": torch.ones(len(texts), 6, 8)}
    >>> fast = linearise(
    ...     encoder, tokenizer, ["a b", "c d"] * 4, steps=2, distil_steps=0,
    ...     n_features=4, measure=False,
    ... )
    >>> fast.linearise_summary.n_texts
    8
    """
    known = [setting.name for setting in fields(LineariseSettings)]
    for name in options:
        check_member("options", name, known)
    chosen = replace(settings or LineariseSettings(), **options)
    check_seed("seed", seed)
    model = with_positions(as_teacher(model).model, chosen.max_length or 0)
    teacher = Stack(model)
    if teacher.has_bias:  # the band would have to be given its part of it
        chosen = replace(chosen, window=0, exact_length=0)
    kept = _check_keep_exact(teacher, keep_exact)
    source = make_generator(seed, 0)
    recorded, held_out = record_texts(
        teacher, tokenizer, texts, chosen, generator=source, ranks=ranks
    )
    begun = process_time()
    total = len(teacher.sites) * chosen.steps + chosen.distil_steps
    with (
        in_mode(model, train=False),
        progress_bar("learning heads", total, visible=progress) as advance,
    ):
        file = None if checkpoint is None else Path(checkpoint)
        asked = "" if file is None else _fingerprint(model, texts, chosen, seed)
        fits = ranks.share(_load_fits(file, asked) if file and ranks.writes else [])
        layers = enumerate(zip(recorded.layers(), held_out.layers(), strict=True))
        # As many layers at a time as there are processes, and each learns one of them.
        turns = (
            (n, rows if n % ranks.world == ranks.rank else ()) for n, rows in layers
        )
        while some := list(islice(turns, ranks.world)):
            own = {
                number: fit_layer(
                    *rows,
                    chosen,
                    generator=make_generator(seed, 1, number),
                    watch=partial(advance, note=f"layer {number}"),
                )
                for number, rows in some
                if rows and number >= len(fits)
            }
            made = sum(fit.steps for fit in own.values())
            advance(len(some) * chosen.steps - made, note=f"layer {some[-1][0]}")
            new = {n: fit for part in ranks.collect(own) for n, fit in part.items()}
            fits += [new[number] for number in sorted(new)]
            if file is not None and new and ranks.writes:
                _save_fits(file, asked, fits)
        exact = _exact_heads(kept, fits)
        student = _copy_with_heads(teacher, chosen, exact)
        _fill(student, fits)
        learned = process_time() - begun
        random = random_student(teacher, chosen.n_features, seed)
        report = LineariseReport(
            chosen.feature_map,
            chosen.n_features,
            [list(heads.exact_heads) for heads in linearised_heads(student.model)],
            before=[float(fit.before.mean()) for fit in fits],
            after=[float(fit.after.mean()) for fit in fits],
            random=[float(fit.random.mean()) for fit in fits],
            head_divergence=[fit.after.tolist() for fit in fits],
            cosine_start=cosine_with(held_out, student, chosen.pooling),
            cosine_random=cosine_with(held_out, random, chosen.pooling),
            n_texts=recorded.n_texts + held_out.n_texts,
            n_held_out=held_out.n_texts,
        )
        begun = process_time()
        watch = partial(advance, note="all layers")
        source = make_generator(seed, 2)
        distil(student, recorded, held_out, chosen, generator=source, watch=watch)
        report.seconds = learned + process_time() - begun
        report.cosine = cosine_with(held_out, student, chosen.pooling)
        if chosen.int8:
            use_int8(student)
            report.cosine_int8 = cosine_with(held_out, student, chosen.pooling)
        _set_exact_length(student.model, chosen.exact_length)
        if measure and ranks.writes:
            most = n_positions(model) or chosen.max_length or _LONGEST_SHOWN
            lengths = [n for n in _SHOWN if n <= most]
            batch = recorded.batches[-1]
            report.speed = measure_speed(teacher, student, batch, lengths)
    fast: Any = student.model
    fast.linearise_summary = report
    return fast


def describe(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    settings: LineariseSettings | None = None,
    *,
    seed: int = 0,
) -> list[str]:
    """Say what `linearise` would replace, how long it would take and where it pays.

    The times of learning are of a few steps, made on a few of the texts.

    Parameters
    ----------
    model, tokenizer, texts, settings, seed
        As in `linearise`.

    Returns
    -------
    list of str
        Lines to print.
    """
    chosen = settings or LineariseSettings()
    stack = as_teacher(model)
    heads = [site.num_heads for site in stack.sites]
    local = len(stack.blocks) - len(heads)
    limit = chosen.max_length or n_positions(model) or longest_text(model)
    few = replace(chosen, distil_steps=0, max_tokens=min(chosen.max_tokens, 4000))
    reports = []
    for steps in (2, 10):
        fast: Any = linearise(
            model, tokenizer, texts, settings=replace(few, steps=steps), seed=seed,
            measure=steps == 2, progress=False,
        )  # fmt: skip
        reports.append(fast.linearise_summary)
    report, longer = reports
    seconds = max(longer.seconds - report.seconds, 0) / 8
    seconds *= chosen.steps + _STEP_OF_ALL * chosen.distil_steps
    pays = [n for n, (slow, quick) in report.speed.items() if quick < slow]
    return [
        f"{len(heads)} layers of {heads[0]} heads get {chosen.n_features} particles "
        f"each ({chosen.feature_map}, window {chosen.near})"
        + (f"; {local} local layers stay as they are" if local else ""),
        f"texts of at most {limit} tokens are read",
        f"about {report.seconds + seconds:.0f} s of processor time to learn",
        *(
            f"{n:5d} tokens: {slow / quick:.2f} times as fast as softmax"
            for n, (slow, quick) in report.speed.items()
        ),
        f"it pays from {min(pays)} tokens on" if pays else "it does not pay here",
    ]


def _fingerprint(
    model: nn.Module, texts: Sequence[str], settings: LineariseSettings, seed: int
) -> str:
    """Hash what the learned layers depend on."""
    digest = hashlib.sha256(json.dumps([seed, repr(settings), list(texts)]).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(numbers.numpy())
    return digest.hexdigest()


def _save_fits(file: Path, asked: str, fits: Sequence[LayerFit]) -> None:
    tensors = {
        f"{number}.{name}": getattr(fit, name)
        for number, fit in enumerate(fits)
        for name in _FITTED
    }
    facts = {"format": _FORMAT, "asked": asked, "steps": [fit.steps for fit in fits]}
    write_archive(file, tensors, facts)


def _load_fits(file: Path, asked: str) -> list[LayerFit]:
    """Read the layers that an interrupted call has learned."""
    if not file.exists():
        return []
    complaint = "is not a checkpoint of `linearise`"
    tensors, facts = read_archive(file, complaint=complaint, form=_FORMAT)
    if facts.get("asked") != asked:
        raise ParameterError(
            f"`checkpoint` must be of the same model, texts and settings; "
            f"{str(file)!r} is not. Remove it, or choose another."
        )
    try:
        return [
            LayerFit(steps=int(steps), **{x: tensors[f"{number}.{x}"] for x in _FITTED})
            for number, steps in enumerate(facts["steps"])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{file} {complaint}: {error!r}.") from error


def _check_keep_exact(teacher: Stack, keep_exact: Any) -> int | list[list[int]]:
    """Turn `keep_exact` into heads by layer, or a number of them, before all else."""
    counts = [site.num_heads for site in teacher.sites]
    if isinstance(keep_exact, int):
        return check_count("keep_exact", keep_exact, at_least=0, at_most=sum(counts))
    if not isinstance(keep_exact, Sequence) or isinstance(keep_exact, str):
        raise ParameterTypeError(
            "`keep_exact` must be a number of heads, or a list of layers and of pairs "
            f"(layer, head); got {keep_exact!r}."
        )
    heads: list[list[int]] = [[] for _ in counts]
    for entry in keep_exact:
        layer, *head = entry if isinstance(entry, tuple) else (entry,)
        check_places([layer], len(counts), "layers")
        check_places(head, counts[layer])
        heads[layer] += head or range(counts[layer])
    return heads


def _exact_heads(kept: int | list[list[int]], fits: list[LayerFit]) -> list[list[int]]:
    if not isinstance(kept, int):
        return kept
    worst = torch.stack([fit.after for fit in fits])
    chosen = worst.flatten().topk(kept).indices.tolist()
    pairs = [divmod(number, worst.shape[1]) for number in chosen]
    return [[head for at, head in pairs if at == layer] for layer in range(len(fits))]


def linearised_heads(model: nn.Module) -> list[LinearisedHeads]:
    """List the learned heads of a model, in the order of its layers.

    Parameters
    ----------
    model
        A linearised model.

    Returns
    -------
    list of LinearisedHeads
        One entry for each layer.
    """
    return [m for m in model.modules() if isinstance(m, LinearisedHeads)]


def random_student(teacher: Stack, n_features: int, seed: int) -> Stack:
    """Copy an encoder with FAVOR+ and orthogonal random features: the control."""
    settings = LineariseSettings(n_features, SOFTMAX_KERNEL_MAP)
    student = _copy_with_heads(teacher, settings, [()] * len(teacher.sites))
    source = make_generator(seed, 3)
    drawn = (
        orthogonal_favor(heads.num_heads, n_features, heads.head_dim, generator=source)
        for heads in linearised_heads(student.model)
    )
    _fill(student, drawn)
    return student


def _copy_with_heads(
    teacher: Stack, settings: LineariseSettings, exact_heads: Sequence[Sequence[int]]
) -> Stack:
    model = teacher.model
    kind = {name: getattr(settings, name) for name in ("n_features", "feature_map")}
    kind |= {"window": settings.near} if settings.near else {}
    if is_pretrained(model):
        fast = with_linearised_heads(model, exact_heads=exact_heads, **kind)
        return Stack(fast.eval())
    fast = copy.deepcopy(model)
    layers = {}
    for site, heads in zip(Stack(fast).sites, exact_heads, strict=True):
        if not isinstance(site.module, nn.MultiheadAttention):
            raise ParameterError(
                f"`model` must have softmax attention, torch's or that of {FAMILIES}; "
                f"got {type(site.module).__name__}."
            )
        layer = LinearisedAttention(site.module, exact_heads=heads, **kind)
        layers[site.name] = layer
    swap_layers(fast, layers)
    return Stack(fast.eval())


def _set_exact_length(model: Any, length: int) -> None:
    """Let short texts attend by softmax, after features have learned from all."""
    for heads in linearised_heads(model):
        heads.exact_length = length
    if length and is_pretrained(model):
        model.config.coulomb["exact_length"] = length


def _fill(student: Stack, layers: Iterable[HeadParticles | LayerFit]) -> None:
    for heads, learned in zip(linearised_heads(student.model), layers, strict=True):
        heads.fill(learned)


@dataclass
class KernelTable:
    """Errors against softmax attention on held-out text.

    Parameters
    ----------
    methods
        Names of the kinds of features, with their number where they have one.
    divergence
        For each method, KL of attention rows by layer and head.
    output_error
        For each method, relative error of attention's output by layer and head.
    """

    methods: list[str]
    divergence: dict[str, list[list[float]]]
    output_error: dict[str, list[list[float]]]

    def by_layer(self, method: str, which: str = "divergence") -> list[float]:
        """Average over the heads.

        Parameters
        ----------
        method
            One of `methods`.
        which
            "divergence" or "output_error".

        Returns
        -------
        list of float
            One number for each layer.
        """
        layers = getattr(self, which)[method]
        return [sum(heads) / len(heads) for heads in layers]

    def worst_heads(self, method: str, count: int) -> list[tuple[int, int, float]]:
        """List the heads best kept exact: those with the largest divergence.

        Parameters
        ----------
        method
            One of `methods`.
        count
            How many.

        Returns
        -------
        list
            Layer, head and divergence, the worst first.
        """
        heads = [
            (layer, head, value)
            for layer, values in enumerate(self.divergence[method])
            for head, value in enumerate(values)
        ]
        return sorted(heads, key=lambda entry: -entry[2])[:count]

    def as_dict(self) -> dict[str, Any]:
        """Give the numbers as plain data for JSON."""
        return dict(vars(self))


def kernel_table(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    n_features: Sequence[int] = (16, 64, 256),
    steps: int = 100,
    max_tokens: int = 12_000,
    seed: int = 0,
    progress: bool | None = None,
) -> KernelTable:
    """Compare learned, random and fixed features with softmax attention.

    Real queries and keys of the model are recorded on the texts. Learned particles and
    random features are judged on a tenth of the texts that is held out.

    Parameters
    ----------
    model, tokenizer, texts
        As in `linearise`.
    n_features
        Numbers of features to compare.
    steps
        Steps of the learned particles in each layer.
    max_tokens
        Tokens that are recorded.
    seed
        Of everything that is drawn.
    progress
        Show a bar; None shows it on a terminal.

    Returns
    -------
    KernelTable
        Errors by method, layer and head.
    """
    counts = [check_count("n_features", n) for n in n_features]
    teacher = as_teacher(model)
    settings = LineariseSettings(
        steps=steps, max_tokens=max_tokens, distil_steps=0, window=0
    )
    source = make_generator(seed, 0)
    parts = record_texts(teacher, tokenizer, texts, settings, generator=source)
    table = KernelTable([], {}, {})
    total = len(teacher.sites)
    with (
        in_mode(model, train=False),
        progress_bar("comparing kernels", total, visible=progress) as advance,
    ):
        layers = zip(*(part.layers() for part in parts), strict=True)
        for number, (rows, held_out) in enumerate(layers):
            source = make_generator(seed, 4, number)
            few = [part.some_queries(_ROWS, generator=source) for part in held_out]
            _, heads, _, dim = few[0].q.shape
            nothing, eye = torch.zeros(heads, 1, dim), torch.eye(dim)
            plain, softmax = map(as_positive_map, (DEFAULT_MAP, SOFTMAX_KERNEL_MAP))
            elu = CustomMap(_elu_plus_one)
            _add(table, "uniform", few, untilted(nothing, plain))
            _add(table, "elu + 1", few, untilted(eye.expand(heads, dim, dim), elu))
            for count in counts:
                normal = torch.randn(heads, count, dim, generator=source)
                _add(table, f"FAVOR+ {count}", few, untilted(normal, softmax))
                favor = orthogonal_favor(heads, count, dim, generator=source)
                _add(table, f"orthogonal {count}", few, favor)
                chosen = replace(settings, n_features=count)
                again = make_generator(seed, 1, number)
                fit = fit_layer(rows, held_out, chosen, generator=again)
                learned = HeadParticles(fit.positions, fit.tilt, plain)
                _add(table, f"learned {count}", few, learned)
            advance(note=f"layer {number}")
    table.methods = list(table.divergence)
    return table


def _add(
    table: KernelTable, method: str, few: list[Rows], particles: HeadParticles
) -> None:
    kl = RowDivergence.measure(few, particles)
    error = OutputError.measure(few, particles).sqrt()
    table.divergence.setdefault(method, []).append(kl.tolist())
    table.output_error.setdefault(method, []).append(error.tolist())


def _elu_plus_one(x: Tensor, particles: Particles) -> Tensor:
    return 1 + functional.elu(projections(x, particles))
