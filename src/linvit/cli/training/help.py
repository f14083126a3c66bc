"""`linvit fit --help`: the options that one needs, in short. `--help=all` shows every one."""

import pkgutil
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from linvit.runs.parser import Option, options_of
from linvit.tasks.base import SET_BY_DATA
from linvit.terminal import entry, reflow

TASK, DATA = "linvit.tasks.ClassificationTask", "linvit.data.ClassificationData"
TRAINER = {
    "max_epochs": "Epochs.",
    "accelerator": "cpu, gpu, or auto.",
    "devices": "How many, which, or auto; several use DDP.",
    "precision": "Such as 32-true or 16-mixed; bf16-mixed where the device has it.",
    "logger": "Such as WandbLogger, beside TensorBoard and metrics.csv.",
    "accumulate_grad_batches": "Batches per optimiser step.",
    "gradient_clip_val": "Largest gradient norm.",
    "callbacks": "List; --trainer.callbacks+=NAME adds one.",
    "fast_dev_run": "One batch of everything, nothing saved.",
    "default_root_dir": "Where run folders go; checkpoints by default.",
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


def short_help(verb: str, task: str = TASK, data: str = DATA) -> str:
    """What the verb does, the options that matter with their defaults, examples."""
    run = "--config RUN/config.yaml --ckpt_path RUN"
    start = "--config quickstart" if verb == "fit" else run
    lines = [
        OPENING[verb],
        "",
        reflow(f"usage: linvit {verb} {start} [--option=value ...]"),
        "",
        *_row(
            "--config",
            "CONFIG",
            "File, or name (linvit list configs); of several the last wins and names the run.",
        ),
        *_row("--ckpt_path", "FILE", "Checkpoint or run; decides the model."),
        *(
            _row("--resume", "auto", "Continue the newest run of this configuration, or start one.")
            if verb == "fit"
            else _row("--untrained", "", "Take a model without a checkpoint, with random weights.")
        ),
        *_row("--seed_everything", "0", "Seed of all random numbers."),
        *_row("--print_config", "", "Print the whole configuration and stop."),
        *_section("model", task, SET_BY_DATA),
        *_section("data", data),
    ]
    defaults = options_of(Trainer)
    lines += [
        *(line for name, text in TRAINER.items() for line in _row(f"--trainer.{name}", defaults[name].default, text)),
        "",
        "A backbone or attention is a name, or a name with options:",
        "  --model.attention=linear",
        "  --model.attention.name=linear --model.attention.feature_map=relu",
        "  names: linvit list     every option: linvit " + verb + " --help=all",
    ]
    return "\n".join(lines)


def _section(key: str, path: str, hidden: tuple[str, ...] = ()) -> Iterator[str]:
    """The options of a class with the first sentence of their documentation, nested ones last."""
    owner = pkgutil.resolve_name(path)
    hidden = (*hidden, *getattr(owner, "advanced_options", ()))
    options = [(name, option) for name, option in options_of(owner).items() if name.rpartition(".")[2] not in hidden]
    for name, option in sorted(options, key=_is_nested):
        yield from _row(f"--{key}.{name}", option.default, option.help)


def _is_nested(option: tuple[str, Option]) -> bool:
    return "." in option[0]


def _row(option: str, default: Any, text: str) -> Iterator[str]:
    sentence = " ".join(text.split()).partition(". ")[0].removesuffix(".")
    shown = "null" if default is None else str(default)
    given = f"{option}={shown}" if shown else option
    yield from entry(f"  {given}", sentence)
