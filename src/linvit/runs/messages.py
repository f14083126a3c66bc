"""Messages of libraries that say nothing about the user's run: they are not shown."""

import logging
import threading
import warnings

from linvit.plain_text import printable

WARNINGS = (
    r".*isinstance\(treespec, LeafSpec\)",
    r"You have overridden `on_after_batch_transfer`",
    r".*does not have many workers",
    r"Your `IterableDataset` has `__len__` defined",  # and it is right: see linvit.data.sources.stream
    r"Checkpoint directory .* exists and is not empty",  # it is that of the run which is resumed
)
ADVERTISEMENT = "Tip: For seamless cloud"
LOGGER = "lightning.pytorch.utilities.rank_zero"


def hide_library_messages() -> None:
    """Hides warnings about libraries' own affairs, and advertisements."""
    for warning in WARNINGS:
        warnings.filterwarnings("ignore", warning)
    logging.getLogger(LOGGER).addFilter(_shown)
    threading.excepthook = _say_unless_disk_is_full


def _shown(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return ADVERTISEMENT not in record.msg


def _say_unless_disk_is_full(error: threading.ExceptHookArgs) -> None:
    """Prints no traceback of the thread in which TensorBoard writes: the logger says that it could not."""
    if not (issubclass(error.exc_type, OSError) and type(error.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(error)
