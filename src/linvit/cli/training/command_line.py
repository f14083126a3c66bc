"""`linvit fit | validate | test | predict`: from the command line to a run, or to the help."""

import pkgutil
from typing import Any

from lightning.pytorch import Trainer

from linvit.machine import keep_memory
from linvit.runs.library_messages import hide_library_messages
from linvit.runs.parser import CommandLine, options_of
from linvit.runs.run import Run
from linvit.tasks.base import SET_BY_DATA
from linvit.terminal import entry, reflow

HELP = ("-h", "--help")
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
CONFIG = "File, or name (linvit list configs); of several the last wins and names the run."
RESUME = "Continue the newest run of this configuration, or start one."
UNTRAINED = "Take a model without a checkpoint, with random weights."
CLOSING = """
A backbone or attention is a name, or a name with options:
  --model.attention=linear
  --model.attention.name=linear --model.attention.feature_map=relu
  names: linvit list     every option: linvit {} --help=all"""


def train(argv: list[str]) -> None:
    """Does what a command line says; with --help explains the classes that it names instead."""
    keep_memory()
    hide_library_messages()
    verb, *options = ["--help" if argument == "--help=all" else argument for argument in argv if argument not in HELP]
    if set(HELP).isdisjoint(argv):
        Run(verb, options).start()
    elif options:
        settings = CommandLine(verb, options).config
        print(short_help(verb, settings.model.class_path, settings.data.class_path))
    else:
        print(short_help(verb))


def short_help(verb: str, task: str = TASK, data: str = DATA) -> str:
    """What the verb does, the options that one needs with their defaults; `--help=all` shows every one."""
    fit = verb == "fit"
    start = "--config quickstart" if fit else "--config RUN/config.yaml --ckpt_path RUN"
    rows: list[tuple[str, Any, str]] = [
        ("--config", "CONFIG", CONFIG),
        ("--ckpt_path", "FILE", "Checkpoint or run; decides the model."),
        ("--resume", "auto", RESUME) if fit else ("--untrained", "", UNTRAINED),
        ("--seed_everything", "0", "Seed of all random numbers."),
        ("--print_config", "", "Print the whole configuration and stop."),
    ]
    for key, path, hidden in (("model", task, SET_BY_DATA), ("data", data, ())):
        owner = pkgutil.resolve_name(path)
        hidden = (*hidden, *getattr(owner, "advanced_options", ()))
        own = [(name, one) for name, one in options_of(owner).items() if name.rpartition(".")[2] not in hidden]
        own.sort(key=lambda option: "." in option[0])  # nested ones last
        rows += [(f"--{key}.{name}", one.default, one.help) for name, one in own]
    defaults = options_of(Trainer)
    rows += [(f"--trainer.{name}", defaults[name].default, text) for name, text in TRAINER.items()]
    lines = [OPENING[verb], "", reflow(f"usage: linvit {verb} {start} [--option=value ...]"), ""]
    for option, default, text in rows:
        given = "" if default == "" else f"={'null' if default is None else default}"
        lines += entry(f"  {option}{given}", " ".join(text.split()).partition(". ")[0].removesuffix("."))
    return "\n".join([*lines, CLOSING.format(verb)])
