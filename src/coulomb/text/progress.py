"""Live progress of training: a bar, and TensorBoard if it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coulomb._support.errors import ParameterError
from coulomb._support.progress import Advance, progress_bar

if TYPE_CHECKING:
    from coulomb.text.training import Progress

_EVERY = 10  # steps between two changes of the bar


class Display:
    """Tells what training does while it does it."""

    def __init__(self, advance: Advance, writer: Any = None) -> None:
        self._advance, self._writer = advance, writer
        self._validation = ""

    def begin(self, step: int) -> None:
        """Say how many steps were made before."""
        self._advance(step)

    def stepped(self, now: "Progress", per_epoch: int) -> None:
        """Say that a step of Phase B was made."""
        steps = (now.step - 1) % per_epoch + 1
        speed = now.tokens / max(now.seconds, 1e-9)
        note = f"loss {now.loss / steps:.4f}, {speed:,.0f} tokens/s{self._validation}"
        self._advance(1, note=note)
        if self._writer is not None and now.step % _EVERY == 0:
            self._writer.add_scalar("loss", now.loss / steps, now.step)

    def aligned(self, record: dict[str, Any]) -> None:
        """Say how Phase A goes."""
        note = f"Phase A, step {record['step']}, alignment {record['alignment']:.4g}"
        if "held_out" in record:
            note += f", held out {record['held_out']:.4g}"
        self._advance(0, note=note)
        if self._writer is not None:
            for name in ("alignment", "held_out"):
                if name in record:
                    value = record[name]
                    self._writer.add_scalar(f"phase_a/{name}", value, record["step"])

    def ended_epoch(self, record: dict[str, Any]) -> None:
        """Say what an epoch gave."""
        self._validation = f", validation {record['validation_accuracy']:.4f}"
        self._advance(0, note=f"epoch {record['epoch']}{self._validation}")
        if self._writer is not None:
            for name, value in record.items():
                if name.startswith("validation_"):
                    place = name.replace("_", "/", 1)
                    self._writer.add_scalar(place, value, record["step"])


@contextmanager
def show(total: int, visible: bool | None, log_dir: Path | None) -> Iterator[Display]:
    """Show progress while the block runs."""
    writer = _writer(log_dir) if log_dir is not None else None
    try:
        with progress_bar("training", total, visible=visible) as advance:
            yield Display(advance, writer)
    finally:
        if writer is not None:
            writer.close()


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ParameterError(
            "`tensorboard` needs its extra: pip install 'coulomb[tensorboard]'."
        ) from error
    return SummaryWriter(str(folder))
