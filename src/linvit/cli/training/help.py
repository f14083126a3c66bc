"""Text of `linvit fit --help`, without importing the explained classes, which takes seconds."""

from collections.abc import Iterable
from pathlib import Path

from linvit.io.terminal import entry, reflow

HELP = ("-h", "--help")
OPTIONS = Path(__file__).with_name("options.tsv")
"""File with the result of `option_rows`; tests/cli/test_help.py compares and rewrites it."""
Row = tuple[str, str]
"""An option, `--name=default`, and a sentence about it."""
TRAINER = {
    "max_epochs": "Epochs.",
    "accelerator": "cpu, gpu, or auto.",
    "devices": "Number, list, or auto; several use DDP.",
    "precision": "Such as 32-true or 16-mixed; bf16-mixed where the device has it.",
    "logger": "Such as WandbLogger, in addition to TensorBoard and metrics.csv.",
    "accumulate_grad_batches": "Batches per optimiser step.",
    "gradient_clip_val": "Maximum gradient norm.",
    "callbacks": "List; --trainer.callbacks+=NAME adds one.",
    "fast_dev_run": "One batch of everything, nothing saved.",
    "default_root_dir": "Folder of all runs; checkpoints by default.",
}
OPENING = {
    "fit": "Trains a model. The run goes to checkpoints/CONFIG_NAME/version_N.",
    "validate": "Scores a checkpoint on the validation split.",
    "test": "Scores a checkpoint on the test split.",
    "predict": (
        "Writes the predictions of a checkpoint beside its run, for a data source.\n"
        "For files and folders: linvit predict --model RUN IMAGES"
    ),
}
CONFIG = "File or name (linvit list configs); the last one wins and names the run."
RESUME = "Resume the newest run of this configuration, or start one."
UNTRAINED = "Use a model without a checkpoint, with random weights."
CLOSING = """
A backbone or attention is a name, or a name with options:
  --model.attention=linear
  --model.attention.name=linear --model.attention.feature_map=relu
  names: linvit list     every option: linvit {} --help=all"""


def default_rows() -> list[Row]:
    """Returns the options in the file."""
    lines = OPTIONS.read_text(encoding="utf-8").splitlines()
    return [(option, text) for option, _, text in (line.partition("\t") for line in lines)]


def short_help(verb: str, rows: Iterable[Row]) -> str:
    """Returns the description of a verb, the options of every run, and others; `--help=all` prints every option."""
    fit = verb == "fit"
    start = "--config quickstart" if fit else "--config RUN/config.yaml --ckpt_path RUN"
    own = [
        ("--config=CONFIG", CONFIG),
        ("--ckpt_path=FILE", "Checkpoint or run; determines the model."),
        ("--resume=auto", RESUME) if fit else ("--untrained", UNTRAINED),
        ("--seed_everything=0", "Seed of all random numbers."),
        ("--print_config", "Print the whole configuration and stop."),
    ]
    lines = [OPENING[verb], "", reflow(f"usage: linvit {verb} {start} [--option=value ...]"), ""]
    for option, text in (*own, *rows):
        lines += entry(f"  {option}", text.removesuffix("."))
    return "\n".join([*lines, CLOSING.format(verb)])
