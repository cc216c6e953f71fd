"""Two phases: the particles are aligned, then the rest learns by cross-entropy.

A run is a function of its data, settings and step: batches, dropout and noise are drawn
from streams named by the seed and the step. What is saved is enough to go on, and going
on gives the weights of a run that was never interrupted.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count
from coulomb._support.errors import DivergedError, FileFormatError
from coulomb._support.streams import make_generator
from coulomb.attention.encoder.batches import IGNORED, TokenBatch
from coulomb.attention.encoder.packed import packed_logits
from coulomb.attention.encoder.packed_gradients import recycle_gradient
from coulomb.dynamics.loop import load_run
from coulomb.text._average import RunningAverage
from coulomb.text._starts import keep_start
from coulomb.text.corpora import Corpus
from coulomb.text.optimiser import make_optimiser
from coulomb.text.phases import run_phase_a
from coulomb.text.progress import Display, show
from coulomb.text.runs import CHECKPOINT, check_tensors
from coulomb.text.scoring import judged_by, score_split
from coulomb.text.settings import TextSettings
from coulomb.text.setup import DROPOUT, ORDER, WORDS, Setup, set_up
from coulomb.text.stores import AbstractStore, Checkpoint, MemoryStore
from coulomb.text.tokens import Vocabulary
from coulomb.text.variants import find_variant


@dataclass(frozen=True, eq=False)
class Trained:
    """The end of a run."""

    weights: dict[str, Tensor]
    metrics: dict[str, Any]
    history: list[dict[str, Any]]


@dataclass
class Progress:
    """Where training is; everything a checkpoint holds besides tensors."""

    step: int = 0
    aligned: bool = False
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    best: float = -math.inf
    best_epoch: int = 0
    spent: float = 0.0
    alignment: dict[str, Any] | None = None

    def facts(self) -> dict[str, Any]:
        """Give everything as plain data."""
        plain = dict(vars(self))
        plain["best"] = None if math.isinf(self.best) else self.best
        return plain

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Progress":
        """Read what `facts` gave."""
        values = dict(facts)
        if values.get("best") is None:
            values["best"] = -math.inf
        return cls(**values)


def train(
    corpus: Corpus,
    settings: TextSettings,
    vocabulary: Vocabulary,
    *,
    store: AbstractStore | None = None,
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
    setup = set_up(corpus, settings, vocabulary)
    trainer = _Trainer(setup, store or MemoryStore(), save_every)
    trainer.resume()
    with show(trainer.total, progress, log_dir) as display:
        trainer.run(display)
    return trainer.finish()


class _Trainer:
    """The loop of one run. Its state is the model, the optimisers and `now`."""

    def __init__(self, setup: Setup, store: AbstractStore, save_every: int) -> None:
        self.setup, self.store, self.save_every = setup, store, save_every
        self.model, self.settings = setup.model, setup.settings
        self.now = Progress()
        self.per_epoch = -(-len(setup.rows["train"]) // self.settings.batch_size)
        enough = -(-self.settings.min_steps // self.per_epoch)
        self.total = max(self.settings.epochs, enough) * self.per_epoch
        self.optimisers = _optimisers(self.model, self.settings)
        memory = self.settings.average_epochs * self.per_epoch
        self.average = RunningAverage(self.model, memory)
        moves = find_variant(self.settings.attention).phase_a != "none"
        self.align_at = self.settings.align_after * self.per_epoch if moves else None
        self.now.aligned = not moves

    # A checkpoint

    def resume(self) -> None:
        """Take up the last checkpoint, if there is one."""
        found = self.store.load()
        aligned = 0
        if found is not None:
            try:
                self.now = Progress.from_facts(found.facts)
            except TypeError as error:
                raise FileFormatError(f"{CHECKPOINT} is damaged: {error}.") from error
            expected = self._tensors(fill=True)
            check_tensors(Path(CHECKPOINT), found.tensors, expected)
            self._take(found.tensors)
            aligned = (
                _steps_of(self.store.particles) if self.align_at is not None else 0
            )
        self.store.forget_after(self.now.step, aligned)

    def _save(self) -> None:
        self.store.save(Checkpoint(self._tensors(fill=True), self.now.facts()))

    def _tensors(self, *, fill: bool) -> dict[str, Tensor]:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                for parameter in group["params"]:
                    state = optimiser.state[parameter]
                    if not state and fill:
                        # As torch begins, so that every checkpoint has one form.
                        state["step"] = torch.zeros(())
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
                    for key, value in state.items():
                        tensors[f"adam.{names[id(parameter)]}.{key}"] = value
        for name, value in self.average.tensors().items():
            tensors[f"average.{name}"] = value
        return tensors

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        prefix = "model."
        self.model.load_state_dict(
            {
                name.removeprefix(prefix): value
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
        )
        for name, value in self._tensors(fill=True).items():
            if name.startswith("adam."):
                value.copy_(tensors[name])
        prefix = "average."
        self.average.take(
            {
                name.removeprefix(prefix): value
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
        )

    # The loop

    def run(self, display: Display) -> None:
        """Make the steps that are left."""
        display.begin(self.now.step)
        self.model.train()
        while self.now.step < self.total:
            if not self.now.aligned and self.now.step == self.align_at:
                self._align(display)
            epoch = self.now.step // self.per_epoch
            for batch in self._batches(epoch, self.now.step % self.per_epoch):
                self._step(batch)
                self._maybe_save()
                display.stepped(self.now, self.per_epoch)
            self._end_epoch(epoch + 1, display)

    def _align(self, display: Display) -> None:
        self._save()
        keep_start(self.store.particles, self.setup)

        def report(record: dict[str, Any]) -> None:
            self.store.record({"phase": "A", **record})
            display.aligned(record)

        self.now.alignment = run_phase_a(
            self.setup,
            self.store.particles,
            report,
            save_every=self.save_every,
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
        settings, now = self.settings, self.now
        stream = make_generator(settings.seed, DROPOUT, now.step)
        seed = stream.initial_seed() if settings.dropout else None
        logits = packed_logits(self.model, batch, dropout_seed=seed)
        assert batch.labels is not None
        loss = functional.cross_entropy(
            logits,
            batch.labels,
            ignore_index=IGNORED,
            label_smoothing=settings.label_smoothing,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        rate = learning_rate(settings, now.step, self.total)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        recycle_gradient(self.model.token_embedding.weight, batch.token_ids)
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DivergedError(
                f"The loss is {value} at step {now.step}; use a smaller `lr`."
            )
        now.step += 1
        self.average.add(now.step)
        now.loss += value
        now.tokens += len(batch.token_ids)
        now.seconds += time.perf_counter() - began

    def _maybe_save(self) -> None:
        inside = self.now.step % self.per_epoch
        if inside and self.now.step % self.save_every == 0:
            self._save()

    def _end_epoch(self, epoch: int, display: Display) -> None:
        now = self.now
        corpus = self.setup.corpus
        judged = judged_by(corpus.kind, corpus.classes)
        with self.average.in_place():
            found = self._score("validation")
            score = found[judged]
            if now.aligned and score > now.best:
                now.best, now.best_epoch = score, epoch
                self.store.keep(self.setup.whole())
        record = {
            "phase": "B",
            "epoch": epoch,
            "step": now.step,
            "loss": now.loss / self.per_epoch,
            "lr": learning_rate(self.settings, now.step - 1, self.total),
            "tokens_per_second": now.tokens / max(now.seconds, 1e-9),
            **{f"validation_{k}": v for k, v in found.items() if _is_number(v)},
        }
        self.store.record(record)
        display.ended_epoch(record)
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
        check_tensors(Path("weights.safetensors"), weights, setup.full.state_dict())
        state = dict(weights)
        state["token_embedding.weight"] = weights["token_embedding.weight"][setup.kept]
        self.model.load_state_dict(state)
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
            "notes": list(corpus.notes),
        }
        return Trained(weights, metrics, self.store.history())


def learning_rate(settings: TextSettings, step: int, total: int) -> float:
    """Give the learning rate of a step of Phase B.

    Examples
    --------
    >>> from coulomb.text.settings import preset
    >>> chosen = preset("paper-main")
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


def _optimisers(
    model: nn.Module, settings: TextSettings
) -> list[torch.optim.Optimizer]:
    moving = {n: p for n, p in model.named_parameters() if p.requires_grad}
    decoupled = settings.optimiser == "adamw"
    if not settings.weight_decay:
        every = moving.values()
        return [make_optimiser(every, lr=settings.lr, decoupled=decoupled)]
    # Embeddings do not decay, so that trimming the vocabulary stays exact.
    decayed = [p for n, p in moving.items() if p.ndim > 1 and "embedding" not in n]
    chosen = {id(p) for p in decayed}
    rest = [p for p in moving.values() if id(p) not in chosen]
    decay = settings.weight_decay
    return [
        make_optimiser(decayed, lr=settings.lr, weight_decay=decay, decoupled=True),
        make_optimiser(rest, lr=settings.lr, decoupled=True),
    ]


def _steps_of(file: Path | None) -> int:
    there = file is not None and file.is_file()
    return load_run(file).state.step if there and file else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
