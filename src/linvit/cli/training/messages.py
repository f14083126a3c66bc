"""Messages of libraries that say nothing about the user's run: they are not shown."""

import logging
import warnings

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
    logging.getLogger(LOGGER).addFilter(_is_no_advertisement)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return ADVERTISEMENT not in record.getMessage()
