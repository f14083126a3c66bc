"""`linvit fit | validate | test | predict`: from the command line to a run, or to the help."""

import logging
import threading
import warnings

from linvit.machine import keep_memory
from linvit.plain_text import printable
from linvit.runs.parser import CommandLine
from linvit.runs.run import Run

HELP = ("-h", "--help")
WARNINGS = (
    r".*isinstance\(treespec, LeafSpec\)",
    r"You have overridden `on_after_batch_transfer`",
    r".*does not have many workers",
    r"Your `IterableDataset` has `__len__` defined",  # and it is right: see linvit.data.sources.stream
    r"Checkpoint directory .* exists and is not empty",  # it is that of the run which is resumed
)
ADVERTISEMENT = "Tip: For seamless cloud"
LOGGER, OF_SEED = "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"
ONCE = ("Seed set to", " is a run: its ")
"""What is said each time that a configuration is read, and of which only the first is shown."""
_said: set[str] = set()


def train(argv: list[str]) -> None:
    """Does what a command line says; with --help explains the classes that it names instead."""
    keep_memory()
    hide_library_messages()
    verb, *options = ["--help" if argument == "--help=all" else argument for argument in argv if argument not in HELP]
    if set(HELP).isdisjoint(argv):
        Run(verb, options).start()
        return
    from linvit.cli.training.help import short_help

    if options:
        settings = CommandLine(verb, options).config
        print(short_help(verb, settings.model.class_path, settings.data.class_path))
    else:
        print(short_help(verb))


def hide_library_messages() -> None:
    """Hides warnings about libraries' own affairs, advertisements, and what was said already of this command."""
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
    """Prints no traceback of the thread in which TensorBoard writes: the logger says that it could not."""
    if not (issubclass(error.exc_type, OSError) and type(error.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(error)
