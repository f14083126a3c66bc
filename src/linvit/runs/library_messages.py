"""Hides warnings and log messages of libraries that do not concern the users of a run."""

import logging
import threading
import warnings

from linvit.io.plain_text import printable

WARNINGS = (
    r".*isinstance\(treespec, LeafSpec\)",
    r"You have overridden `on_after_batch_transfer`",
    r".*does not have many workers",
    r"Your `IterableDataset` has `__len__` defined",  # and it is right: see linvit.data.sources.stream
    r"Grad strides do not match bucket view strides",  # DDP copies such a gradient as it copies all others
    r"Checkpoint directory .* exists and is not empty",  # the folder of the resumed run
)
ADVERTISEMENT = "Tip: For seamless cloud"
LOGGER, OF_SEED = "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"
ONCE = ("Seed set to", " is a run: its ")
"""Messages that are repeated for each configuration that is read; only the first is shown."""
_said: set[str] = set()


def hide_library_messages() -> None:
    """Hides warnings about internals of libraries, advertisements and repeated messages."""
    _said.clear()
    for warning in WARNINGS:
        warnings.filterwarnings("ignore", warning)
    for logger in (LOGGER, OF_SEED):
        logging.getLogger(logger).addFilter(_shown)
    threading.excepthook = _say_unless_disk_is_full  # which is there to be replaced


def _shown(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    repeated = record.msg in _said
    if any(words in record.msg for words in ONCE):
        _said.add(record.msg)
    return not repeated and ADVERTISEMENT not in record.msg


def _say_unless_disk_is_full(error: threading.ExceptHookArgs) -> None:
    """Prints no traceback of the thread in which TensorBoard writes: the logger reports the error."""
    if not (issubclass(error.exc_type, OSError) and type(error.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(error)
