"""`linvit fit --help`: the options that one needs, in short. `--help=all` shows every one."""

from collections.abc import Callable, Iterator
from typing import Any

import docstring_parser
from lightning.pytorch import Trainer

from linvit.cli.terminal import entry, reflow
from linvit.data.base import ImageData
from linvit.data.classification import ClassificationData
from linvit.data.transforms.classification import Augmentation
from linvit.registry import parameters_of
from linvit.tasks import ClassificationTask, Task
from linvit.tasks.base import FACTS

TRAINER = {
    "max_epochs": "Epochs.",
    "accelerator": "cpu, gpu, or auto.",
    "devices": "How many, which, or auto; several use DDP.",
    "precision": "Such as 32-true or 16-mixed; bf16-mixed where the device has it.",
    "logger": "wandb or mlflow, beside TensorBoard and metrics.csv.",
    "accumulate_grad_batches": "Batches per optimiser step.",
    "gradient_clip_val": "Largest gradient norm.",
    "callbacks": "List; --trainer.callbacks+=NAME adds one.",
    "fast_dev_run": "One batch of everything, nothing saved.",
    "default_root_dir": "Where run folders go; checkpoints by default.",
}
FINE = {  # set in recipes, seldom on a command line: only --help=all tells them
    *("betas", "cooldown_epochs", "lr_interval", "lr_lag", "lr_batch", "lr_scaled", "published_batch", "body_lr_scale"),
    *("mix_prob", "mix_switch"),
    *("mean", "std", "image_column", "label_column", "val_fraction", "repeated_aug", "seed"),
    *("crop_ratio", "interpolation", "augment_on", "rotate", "translate", "zoom"),
}
OPENING = {
    "fit": "Trains a model. The run goes to checkpoints/CONFIG_NAME/version_N.",
    "validate": "Scores a checkpoint on the validation split.",
    "test": "Scores a checkpoint on the test split.",
    "predict": "Writes predictions.csv (id, class, probability) beside the checkpoint's run.",
}


def short_help(verb: str) -> str:
    """What the verb does, the options that matter with their defaults, examples."""
    run = "--config RUN/config.yaml --ckpt_path RUN/checkpoints/best.ckpt"
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
        *_row("--ckpt_path", "FILE", "Checkpoint to continue or to score; it decides the model."),
        *_row("--seed_everything", "0", "Seed of all random numbers."),
        *_row("--print_config", "", "Print the whole configuration and stop."),
        *_section("model", ClassificationTask, Task),
        *_section("data", ClassificationData, ImageData),
        *_section("data.augmentation", Augmentation),
    ]
    defaults = parameters_of(Trainer)
    lines += [line for name, text in TRAINER.items() for line in _row(f"--trainer.{name}", defaults[name], text)]
    lines += [
        "",
        "A backbone or attention is a name, or a name with options:",
        "  --model.attention=linear",
        "  --model.attention.name=linear --model.attention.feature_map=relu",
        "  names: linvit list     every option: linvit " + verb + " --help=all",
    ]
    return "\n".join(lines)


def _section(key: str, *owners: Callable[..., Any]) -> Iterator[str]:
    """The options of a class, told by the first sentence of their documentation."""
    documented: dict[str, str] = {}
    for owner in owners:
        for parameter in docstring_parser.parse(owner.__doc__ or "").params:
            documented.setdefault(parameter.arg_name, parameter.description or "")
    for name, default in parameters_of(owners[0]).items():
        if not (key == "model" and name in FACTS) and name not in FINE and name != "augmentation":
            yield from _row(f"--{key}.{name}", default, documented.get(name, ""))


def _row(option: str, default: Any, text: str) -> Iterator[str]:
    sentence = " ".join(text.split()).partition(". ")[0].removesuffix(".")
    shown = "null" if default is None else str(default)
    given = f"{option}={shown}" if shown else option
    yield from entry(f"  {given}", sentence)
