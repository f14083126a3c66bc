"""Reading configurations: exact option names only, and errors one can read."""

import re
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser

from linvit.callbacks import AttentionRank
from linvit.data.classification import ClassificationData
from linvit.data.transforms import Augmentation
from linvit.errors import did_you_mean
from linvit.registry import parameters_of
from linvit.tasks import ClassificationTask

# Lines in which jsonargparse explains its types rather than the user's mistake.
NOISE = re.compile(r"(Does not validate|Subtypes|Errors|Given value|Expected a <class 'NoneType'>|See .*--help)")
UNKNOWN = re.compile(
    r"(?:Option '([\w.]+)' is not accepted|accept option '([\w.]+)'|unrecognized arguments: --([\w.]+))"
)


class Parser(LightningArgumentParser):
    """Takes no abbreviations (`--trainer.max_epoch` is a mistake, not `max_epochs`) and raises instead of exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "exit_on_error": False, **kwargs})


def readable(message: str) -> str:
    """What is wrong with a configuration, out of jsonargparse's message, with the nearest option that exists."""
    lines = [re.sub(r"^\s*- ", "  ", line) for line in message.splitlines()]
    kept = [line for line in lines if line.strip() and not NOISE.match(line.strip())]
    unknown = UNKNOWN.search(message)
    if unknown is None:
        return "\n".join(kept)
    given = next(group for group in unknown.groups() if group).rpartition(".")[2]
    owners = (Trainer, ClassificationTask, ClassificationData, Augmentation, AttentionRank, ModelCheckpoint)
    return "\n".join(kept) + "." + did_you_mean(given, {name for owner in owners for name in parameters_of(owner)})
