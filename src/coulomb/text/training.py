"""Two phases: the particles are aligned, then the rest learns by cross-entropy.

A run is a function of its data, settings and step: batches, dropout and noise are drawn
from streams named by the seed and the step. What is saved is enough to go on, and going
on gives the weights of a run that was never interrupted.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.archive import plain, working_in, write_archive, write_json
from coulomb._support.checks import check_count, make_generator
from coulomb._support.errors import DivergedError, FileFormatError, ParameterError
from coulomb._support.progress import progress_bar
from coulomb._support.ranks import ALONE, Ranks
from coulomb.attention.encoder.layout import IGNORED, TokenBatch
from coulomb.attention.encoder.packed import recycle_gradient
from coulomb.dynamics.loop import load_run
from coulomb.text import run_folder
from coulomb.text.align import run_phase_a
from coulomb.text.data import Corpus
from coulomb.text.evaluate import (
    beside_bag_of_words,
    judged_by,
    log_probabilities,
    logits_of,
    score_split,
    tags_beside_words,
)
from coulomb.text.pretrained import LAYERS, PretrainedEncoder, complete, fit_head
from coulomb.text.run_folder import CHECKPOINT, Checkpoint, Store, check_tensors
from coulomb.text.settings import TextSettings, TrainSettings, find_variant
from coulomb.text.setup import DROPOUT, ORDER, WORDS, Setup, embeddings_of, set_up
from coulomb.text.tokens import Vocabulary

# Adding every step would cost several per cent of training; a short memory needs it.
_LONGEST, _OF_MEMORY = 8, 4
_FUSED = ("cpu", "cuda")  # devices on which torch's Adam can be one pass
_LOG_EVERY = 10  # steps between two losses in TensorBoard
Tell = Callable[..., None]  # of a note, a step, its scalars and how many were made


@dataclass(frozen=True, eq=False)
class Trained:
    """The end of a run."""

    weights: dict[str, Tensor]
    metrics: dict[str, Any]
    history: list[dict[str, Any]]


def train(
    corpus: Corpus,
    settings: TextSettings,
    vocabulary: Vocabulary,
    *,
    store: Store | None = None,
    save_every: int = 500,
    progress: bool | None = None,
    log_dir: Path | None = None,
) -> Trained:
    """Train a classifier, or go on with one.

    Parameters
    ----------
    corpus
        The data.
    settings
        Model and training.
    vocabulary
        What to cut texts with.
    store
        Where to keep checkpoints, and to continue from; None keeps them nowhere.
    save_every
        Steps between two checkpoints; there is one at the end of every epoch too.
    progress
        Show a bar; None shows it on a terminal only.
    log_dir
        A folder for TensorBoard; None for no such logs.

    Returns
    -------
    Trained
        The weights of the best epoch and its metrics.

    Examples
    --------
    >>> from coulomb.text import build_corpus, preset, train_vocabulary
    >>> rows = ["good film", "bad film"] * 16, ["+", "-"] * 16
    >>> corpus = build_corpus("tiny", rows)
    >>> small = {"width": 16, "n_features": 8, "epochs": 2, "min_steps": 0}
    >>> vocabulary = train_vocabulary(rows[0], size=40)
    >>> trained = train(corpus, preset("default", small), vocabulary)
    >>> trained.metrics["split"]
    'validation'
    """
    check_count("save_every", save_every)
    store, ranks = store or Store(), Ranks.join()
    # The first makes a pretrained encoder what it is to be; the others load it.
    with ranks.first() if settings.model.encoder else nullcontext():
        setup = set_up(corpus, settings, vocabulary, store.folder)
    trainer = Trainer(setup, store, save_every, ranks)
    if settings.train.tune == "head" and isinstance(setup.model, PretrainedEncoder):
        if store.folder is None or ranks.writes:
            fit_head(setup.model, setup, store.folder)
            store.keep(setup.whole())
    else:
        trainer.resume()
        with show(trainer.total, progress, log_dir) as display:
            trainer.run(display)
    # What is left to do may write files of its own.
    done: Trained = ranks.share(trainer.finish() if ranks.writes else None)
    return done


def train_in_folder(
    folder: str | Path,
    corpus: Corpus,
    settings: TextSettings,
    vocabulary: Vocabulary,
    *,
    data: Mapping[str, Any] | None = None,
    save_every: int = 500,
    progress: bool | None = None,
    tensorboard: bool = False,
) -> Trained:
    """Begin a run in a new folder.

    Parameters
    ----------
    folder
        New or empty.
    corpus, settings, vocabulary
        As in `coulomb.text.train`.
    data
        Where the corpus came from, so that the run can be resumed; see `load_data`.
    save_every, progress
        As in `coulomb.text.train`.
    tensorboard
        Write logs for TensorBoard into the folder.

    Returns
    -------
    Trained
        Also written into the folder.
    """
    folder, ranks = Path(folder), Ranks.join()
    described = {"name": corpus.name, "pairs": corpus.pairs} | dict(data or {})
    about = settings, corpus.kind, corpus.classes, described, corpus.fingerprint()
    config = run_folder.Config(*about)
    with _working_in(folder, ranks):
        if ranks.writes:
            run_folder.check_free(folder)
            run_folder.write_run(folder, config, vocabulary)
        ranks.wait()
        return _go_on(folder, config, corpus, save_every, progress, tensorboard)


def resume_folder(
    folder: str | Path,
    *,
    corpus: Corpus | None = None,
    save_every: int = 500,
    progress: bool | None = None,
    tensorboard: bool = False,
) -> Trained:
    """Go on with an interrupted run.

    Parameters
    ----------
    folder
        Of the run.
    corpus
        Its data, if it was passed in memory; None reads the files again.
    save_every, progress, tensorboard
        As in `train_in_folder`.

    Returns
    -------
    Trained
        The weights an uninterrupted run would have; of a finished run, what it has.
    """
    folder = Path(folder)
    config = run_folder.read_config(folder)
    with _working_in(folder, Ranks.join()):
        return _go_on(folder, config, corpus, save_every, progress, tensorboard)


def _working_in(folder: Path, ranks: Ranks) -> AbstractContextManager[None]:
    """Keep others out of a folder; processes of one run are in it together."""
    return working_in(folder) if ranks.writes else nullcontext()


def _go_on(
    folder: Path,
    config: run_folder.Config,
    corpus: Corpus | None,
    save_every: int,
    progress: bool | None,
    tensorboard: bool,
) -> Trained:
    pretrained = bool(config.settings.model.encoder)
    ranks = Ranks.join()
    name = run_folder.BEST if pretrained else run_folder.WEIGHTS
    store = Store(folder, name, writes=ranks.writes)
    metrics = folder / run_folder.METRICS
    if metrics.exists():
        found = run_folder.read_metrics(folder)
        weights, _ = run_folder.read_tensors(folder / run_folder.WEIGHTS)
        return Trained(weights, found, store.history())
    trained = train(
        run_folder.load_corpus(folder, config, corpus),
        config.settings,
        run_folder.load_vocabulary(folder),
        store=store,
        save_every=save_every,
        progress=progress,
        log_dir=folder / "tensorboard" if tensorboard and ranks.writes else None,
    )
    if not ranks.writes:
        return trained
    if pretrained:
        write_archive(folder / run_folder.WEIGHTS, trained.weights, {})
    write_json(metrics, trained.metrics)
    for name in (run_folder.BEST, LAYERS):
        (folder / name).unlink(missing_ok=True)
    return trained


@dataclass
class Progress:
    """Where training is; everything a checkpoint holds besides tensors."""

    step: int = 0
    aligned: bool = False
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: int = 0
    spent: float = 0.0
    alignment: dict[str, Any] | None = None


class RunningAverage:
    """The average `a <- d a + (1 - d) w` of the parameters that are trained.

    With memory `T`, in steps, what is `t` steps ago has the weight `exp(-t / T)`; near
    the start the average is over the few steps there are.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = RunningAverage(model, 100.0)
    >>> before = model.weight.item()
    >>> _ = model.weight.data.add_(1.0)
    >>> average.add(8)
    >>> with average.in_place():
    ...     before < model.weight.item() < before + 1
    True
    """

    def __init__(self, model: nn.Module, memory: float) -> None:
        self.memory = memory
        self.every = max(1, min(_LONGEST, int(memory / _OF_MEMORY)))
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and memory
        }
        self.restart(0)

    def restart(self, step: int) -> None:
        """Forget everything but the present weights."""
        self._begun = torch.tensor(step)
        self._averages = {n: p.detach().clone() for n, p in self._parameters.items()}

    def add(self, step: int) -> None:
        """Take the present weights into the average, if it is their turn."""
        if not self._averages or step % self.every:
            return
        made = step - int(self._begun)
        memory = min(self.memory, (made + self.every) / 2)
        torch._foreach_lerp_(
            list(self._averages.values()),
            [parameter.detach() for parameter in self._parameters.values()],
            -math.expm1(-self.every / memory),
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in place of the weights while the block runs."""
        kept = {n: p.detach().clone() for n, p in self._parameters.items()}
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(kept)

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def tensors(self) -> dict[str, Tensor]:
        """Give what a checkpoint holds, to be written down or over."""
        return {**self._averages, "begun": self._begun} if self._averages else {}


@contextmanager
def show(total: int, visible: bool | None, log_dir: Path | None) -> Iterator[Tell]:
    """Give what tells a note to a bar and scalars of a step to TensorBoard."""
    with ExitStack() as stack:
        advance = stack.enter_context(progress_bar("training", total, visible=visible))
        writer = None if log_dir is None else stack.enter_context(_writer(log_dir))

        def tell(
            note: str, step: int, scalars: Mapping[str, float], made: int = 0
        ) -> None:
            advance(made, note=note)
            if writer is not None:
                for name, value in scalars.items():
                    writer.add_scalar(name, value, step)

        yield tell


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ParameterError(
            "`tensorboard` needs its extra: pip install 'coulomb[tensorboard]'."
        ) from error
    return SummaryWriter(str(folder))


class Trainer:
    """The loop of one run. Its state is the model, the optimisers and `now`."""

    def __init__(
        self, setup: Setup, store: Store, save_every: int, ranks: Ranks = ALONE
    ) -> None:
        self.setup, self.store, self.save_every = setup, store, save_every
        self.ranks = ranks
        self.model, self.settings = setup.model, setup.settings.train
        self.per_epoch = -(-len(setup.rows["train"]) // self.settings.batch_size)
        enough = -(-self.settings.min_steps // self.per_epoch)
        self.total = max(self.settings.epochs, enough) * self.per_epoch
        self.optimiser = make_optimiser(self.model, self.settings)
        memory = self.settings.average_epochs * self.per_epoch
        self.average = RunningAverage(self.model, memory)
        asked = setup.settings.model
        moves = not asked.encoder and find_variant(asked.attention).phase_a != "none"
        self.align_at = setup.settings.align.after * self.per_epoch if moves else None
        self.now = Progress(aligned=not moves)
        self._accuracy = ""
        self._logits: Callable[..., Tensor] = partial(logits_of, self.model)
        if ranks.world > 1:
            # Adds up gradients while they are computed.
            self._logits = nn.parallel.DistributedDataParallel(_Logits(self.model))

    # A checkpoint

    def resume(self) -> None:
        """Take up the last checkpoint, if there is one."""
        found = self.store.load()
        aligned = 0
        if found is not None:
            self.now = self._progress(found.facts)
            tensors = self._tensors()
            check_tensors(CHECKPOINT, found.tensors, tensors)
            for name in tensors:
                counts = name.endswith((".step", ".begun"))
                if counts and not 0 <= float(found.tensors[name]) <= self.total:
                    raise FileFormatError(f"{CHECKPOINT} is damaged: see {name!r}.")
            weights = {k: found.tensors[f"model.{k}"] for k in self.model.state_dict()}
            self.model.load_state_dict(weights)
            for name, value in tensors.items():
                value.copy_(found.tensors[name])
            file = self.store.particles
            if self.align_at is not None and file is not None and file.is_file():
                aligned = load_run(file).state.step
        self.store.forget_after(self.now.step, aligned)
        self.ranks.wait()

    def _progress(self, facts: Mapping[str, Any]) -> Progress:
        """Read what a checkpoint counts; a wrong type, sign or size is refused."""
        most = {"step": self.total, "best_epoch": self.total}
        known: dict[str, Any] = {part.name: part.type for part in fields(Progress)}
        known["alignment"] = dict | None
        for name in (*known, *facts):
            value, kind = facts.get(name), known.get(name, ())
            # What is not finite would be None in plain data.
            fine = isinstance(value, kind) and plain(value) == value
            fine = fine and isinstance(value, bool) == (kind is bool)
            if fine and isinstance(value, int | float) and name != "best":
                fine = 0 <= value <= most.get(name, math.inf)
            if not fine:
                raise FileFormatError(
                    f"{CHECKPOINT} is damaged: `{name}` cannot be {value!r:.60}."
                )
        return Progress(**facts)

    def _save(self) -> None:
        self.store.save(Checkpoint(self._tensors(), dict(vars(self.now))))

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            state = self.optimiser.state[parameter]
            if not state:
                # As torch begins, so that every checkpoint has one form.
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"adam.{name}.{key}": value for key, value in state.items()}
        averages = self.average.tensors().items()
        return tensors | {f"average.{name}": value for name, value in averages}

    # The loop

    def run(self, tell: Tell) -> None:
        """Make the steps that are left."""
        tell("", 0, {}, made=self.now.step)
        self.model.train()
        while self.now.step < self.total:
            if not self.now.aligned and self.now.step == self.align_at:
                self._align(tell)
            epoch = self.now.step // self.per_epoch
            for batch in self._batches(epoch, self.now.step % self.per_epoch):
                self._step(batch)
                inside = self.now.step % self.per_epoch
                if inside and self.now.step % self.save_every == 0:
                    self._save()
                self._tell_step(tell)
            self._end_epoch(epoch + 1, tell)

    def _align(self, tell: Tell) -> None:
        self._save()

        def report(record: dict[str, Any]) -> None:
            self.store.record({"phase": "A", **record})
            found = {k: record[k] for k in ("alignment", "held_out") if k in record}
            told = [f"{k.replace('_', ' ')} {v:.4g}" for k, v in found.items()]
            step, scalars = record["step"], {f"phase_a/{k}": found[k] for k in found}
            tell(", ".join([f"Phase A, step {step}", *told]), step, scalars)

        self.now.alignment = run_phase_a(
            self.setup,
            self.store.particles,
            report,
            save_every=self.save_every,
            ranks=self.ranks,
        )
        self.now.aligned = True
        self.average.restart(self.now.step)
        self._save()

    def _batches(self, epoch: int, done: int) -> Iterator[TokenBatch]:
        rows, settings = self.setup.rows["train"], self.settings
        generator = make_generator(settings.seed, ORDER, epoch)
        order = torch.randperm(len(rows), generator=generator)
        for some in torch.split(order, settings.batch_size)[done:]:
            batch = rows.batch(some)
            if settings.word_dropout:
                stream = make_generator(settings.seed, WORDS, self.now.step)
                drawn = torch.rand(len(batch.token_ids), generator=stream)
                # The first token of a text is [CLS], which is no word.
                drawn[batch.cu_seqlens[:-1]] = 1.0
                hidden = drawn < settings.word_dropout
                ids = batch.token_ids.masked_fill(hidden, self.setup.unknown)
                batch = batch._replace(token_ids=ids)
            yield batch

    def _step(self, batch: TokenBatch) -> None:
        began = time.perf_counter()
        settings, now, ranks = self.settings, self.now, self.ranks
        own = (ranks.rank,) if ranks.rank else ()
        stream = make_generator(settings.seed, DROPOUT, now.step, *own)
        seed = stream.initial_seed() if self.model.settings.dropout else None
        lengths, alone = batch.cu_seqlens.diff(), ranks.world == 1
        part = batch if alone else batch.take(ranks.own(lengths))
        assert batch.labels is not None
        assert part.labels is not None
        with ranks.talking():
            loss = self._loss(
                self._logits(part, seed), part.labels, "mean" if alone else "sum"
            )
            if not alone:
                # The mean over all ranks' gradients is that of the whole batch's mean;
                # rows too few to be shared are seen by all.
                seen = ranks.world if len(lengths) < ranks.world else 1
                known = (batch.labels != IGNORED) | batch.labels.is_floating_point()
                loss = loss * ranks.world / (seen * max(1, int(known.sum())))
            loss.backward()  # type: ignore[no-untyped-call]
        told = loss.detach() / ranks.world
        ranks.add([told])
        rate = learning_rate(settings, now.step, self.total)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        recycle_gradient(embeddings_of(self.model).weight, batch.token_ids)
        self.optimiser.zero_grad()
        value = float(told)
        if not math.isfinite(value):
            raise DivergedError(
                f"The loss is {value} at step {now.step}; use a smaller `lr`."
            )
        now.step += 1
        self.average.add(now.step)
        now.loss += value
        now.tokens += len(batch.token_ids)
        now.seconds += time.perf_counter() - began

    def _loss(self, outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
        """Cross-entropy, or the squared error in units of the labels' variance."""
        if self.setup.corpus.kind == "number":
            assert isinstance(self.model, PretrainedEncoder)
            gaps = (outputs[:, 0] - labels) / self.model.scale
            return gaps.square().mean() if reduction == "mean" else gaps.square().sum()
        return functional.cross_entropy(
            outputs,
            labels,
            ignore_index=IGNORED,
            label_smoothing=self.settings.label_smoothing,
            reduction=reduction,
        )

    def _tell_step(self, tell: Tell) -> None:
        now = self.now
        loss = now.loss / ((now.step - 1) % self.per_epoch + 1)
        speed = now.tokens / max(now.seconds, 1e-9)
        note = f"loss {loss:.4f}, {speed:,.0f} tokens/s{self._accuracy}"
        logged = {} if now.step % _LOG_EVERY else {"loss": loss}
        tell(note, now.step, logged, made=1)

    def _end_epoch(self, epoch: int, tell: Tell) -> None:
        now = self.now
        corpus = self.setup.corpus
        judged = judged_by(corpus.kind, corpus.classes)
        with self.average.in_place():
            found = self._score("validation")
            score = found[judged]
            if now.aligned and (now.best is None or score > now.best):
                now.best, now.best_epoch = score, epoch
                self.store.keep(self.setup.whole())
        numbers = {k: v for k, v in found.items() if isinstance(v, int | float)}
        record = {
            "phase": "B",
            "epoch": epoch,
            "step": now.step,
            "loss": now.loss / self.per_epoch,
            "lr": learning_rate(self.settings, now.step - 1, self.total),
            "tokens_per_second": now.tokens / max(now.seconds, 1e-9),
            **{f"validation_{k}": v for k, v in numbers.items()},
        }
        self.store.record(record)
        self._accuracy = f", validation {found.get('accuracy', score):.4f}"
        scalars = {f"validation/{k}": v for k, v in numbers.items()}
        tell(f"epoch {epoch}{self._accuracy}", now.step, scalars)
        now.spent += now.seconds
        now.loss, now.tokens, now.seconds = 0.0, 0, 0.0
        self._save()

    def _score(self, split: str) -> dict[str, Any]:
        corpus, rows = self.setup.corpus, self.setup.rows[split]
        return score_split(self.model, rows, corpus.split(split), corpus.classes)

    def finish(self) -> Trained:
        """Score the best weights."""
        setup, corpus = self.setup, self.setup.corpus
        weights = self.store.best()
        check_tensors(run_folder.WEIGHTS, weights, setup.full.state_dict())
        setup.full.load_state_dict(weights)
        facts: dict[str, Any] = {}
        whole = setup.full
        if isinstance(whole, PretrainedEncoder):
            whole, facts = complete(whole, setup, self.store.folder)
            weights = {name: x.clone() for name, x in whole.state_dict().items()}
        self.model = setup.trimmed(whole)
        if self.store.folder is not None and corpus.kind == "token":
            beside = tags_beside_words(corpus, self._score("validation"))
            facts = {"validation": beside}
        elif not facts and self.store.folder is not None:
            scores = log_probabilities(self.model, setup.rows["validation"])
            facts = {"validation": beside_bag_of_words(corpus, scores)}
        found = self._score(corpus.reported_on)
        alignment = self.now.alignment or {}
        metrics = {
            "split": corpus.reported_on,
            "rows": len(corpus.split(corpus.reported_on)),
            "metrics": found,
            "best_epoch": self.now.best_epoch,
            "chosen_by": {"validation": self.now.best},
            "seconds": {"phase_a": alignment.get("seconds", 0.0), "b": self.now.spent},
            "alignment": alignment,
            "notes": [*corpus.notes, *setup.notes],
            **facts,
        }
        return Trained(weights, metrics, self.store.history())


class _Logits(nn.Module):
    """The encoder on packed tokens, as torch's parallel training calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch, dropout_seed: int | None) -> Tensor:
        return logits_of(self.model, batch, dropout_seed)


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """Give the learning rate of a step of Phase B.

    Examples
    --------
    >>> from coulomb.text.settings import preset
    >>> chosen = preset("paper-main").train
    >>> [round(1e4 * learning_rate(chosen, step, 100), 2) for step in (0, 9, 55, 99)]
    [0.2, 2.0, 1.0, 0.0]
    """
    rising = round(settings.warm_up_share * total)
    if step < rising:
        return settings.lr * (step + 1) / rising
    done = (step - rising) / max(1, total - rising)
    if settings.schedule == "linear":
        return settings.lr * (1 - done)
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1 + math.cos(math.pi * done))
    return settings.lr


def make_optimiser(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Make torch's Adam or AdamW, in one pass over the parameters where it can be.

    Embeddings do not decay, so that trimming the vocabulary stays exact.
    """
    moving = {n: p for n, p in model.named_parameters() if p.requires_grad}
    decayed = [p for n, p in moving.items() if p.ndim > 1 and "embedding" not in n]
    rest = [p for n, p in moving.items() if p.ndim < 2 or "embedding" in n]
    kind = torch.optim.AdamW if settings.optimiser == "adamw" else torch.optim.Adam
    fused = all(x.device.type in _FUSED for x in moving.values())
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return kind(groups, lr=settings.lr, fused=fused)
