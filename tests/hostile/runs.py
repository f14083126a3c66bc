"""Folders of runs whose configuration names code that lies beside it."""

import copy
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

import linvit
from linvit.cli import main
from tests.cli.runs import QUICKSTART, tiny
from tests.digit_folders import digit_folder

Door = Callable[[Path, str], object]
NAME = "module_of_a_run"  # of the module, which leaves a mark when it is imported
CLASS = f"{NAME}.Mine"
CALL = {"class_path": CLASS}
CHANGES: dict[str, dict[str, Any]] = {  # of the configuration, by dotted names
    "callbacks": {"trainer.callbacks": [CALL]},
    "callbacks_word": {"trainer.callbacks": CLASS},
    "callbacks_text": {"trainer.callbacks": f"[{{class_path: {CLASS}}}]"},
    "callback_option": {
        "trainer.callbacks": [
            {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"setup": CLASS}},
            {"class_path": "linvit.callbacks.AttentionRank", "init_args": {"images": CALL}},
        ]
    },
    "logger": {"trainer.logger": CALL},
    "strategy": {"trainer.strategy": CALL},
    "plugins": {"trainer.plugins": [CALL]},
    "profiler": {"trainer.profiler": "a_file"},
    "trainer": {"trainer": "trainer.yaml"},
    "data": {"data.class_path": CLASS},
    "data_word": {"data": CLASS},
    "data_file": {"data": "other.yaml"},
    "data_option": {"data.init_args.augmentation": CALL},
    "data_option_word": {"data.init_args.augmentation": CLASS},
    "data_option_file": {"data.init_args.augmentation": "other.yaml"},
    "data_option_text": {"data.init_args.source": f"{{class_path: {CLASS}}}"},
    "data_others": {"data.dict_kwargs": {"augmentation": CALL}},
    "model": {"model.class_path": CLASS},
    "model_word": {"model": CLASS},
    "attention": {"model.init_args.attention": f"{NAME}:Mine"},
    "backbone": {"model.init_args.backbone": {"name": f"{NAME}:Mine"}},
    "backbone_option": {"model.init_args.backbone": {"name": "deit_nano", "depth": CALL}},
    "kernel": {"model.init_args.attention_kernel": f"{NAME}:Mine"},
    "teacher": {"model.init_args.teacher": {"source": "no", "untrained": True, "config": "bad.yaml"}},
    "base": {"base": ["bad.yaml"]},
    "config": {"config": "bad.yaml"},
    "checkpoint": {"checkpoint": CALL},
    "non_finite": {"non_finite": {"enabled": CALL}},
    "stages": {"stages": [{"trainer.callbacks": [CALL]}]},
}
TAG = f"trainer: !!python/name:{CLASS}\n"


def configurations(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of configurations that name the module, made of one that does not."""
    for name, changes in CHANGES.items():
        changed = copy.deepcopy(config)
        for option, value in changes.items():
            *parents, last = option.split(".")
            holder = changed
            for parent in parents:
                holder = holder[parent]
            holder[last] = value
        yield name, yaml.safe_dump(changed)
    yield "tag", TAG + yaml.safe_dump({key: part for key, part in config.items() if key != "trainer"})


def write_module(folder: Path, mark: Path) -> None:
    """Writes the module, and files that name it."""
    ours = "from linvit.data import ClassificationData as Mine"
    (folder / f"{NAME}.py").write_text(f"open({str(mark)!r}, 'w')\n{ours}\n", encoding="utf-8")
    for name, text in {
        "other.yaml": f"class_path: {CLASS}",
        "a_file": f"class_path: {CLASS}",
        "trainer.yaml": f"callbacks: [{{class_path: {CLASS}}}]",
        "bad.yaml": f"trainer: {{callbacks: [{{class_path: {CLASS}}}]}}",
    }.items():
        (folder / name).write_text(f"{text}\n", encoding="utf-8")


def write(root: Path, mark: Path) -> Iterator[Path]:
    """Trains a run on few images, so that each door takes seconds; yields folders NAME/version_0 of copies of it."""
    images = digit_folder(root / "digits", "0123456789", count=6)
    main(["fit", f"--config={QUICKSTART}", *tiny(trainer__default_root_dir=root / "trained", data__source=images)])
    trained = root / "trained" / "quickstart" / "version_0"
    for name, text in configurations(yaml.safe_load((trained / "config.yaml").read_text(encoding="utf-8"))):
        run = root / name / "version_0"
        shutil.copytree(trained, run)
        (run / "config.yaml").write_text(text, encoding="utf-8")
        write_module(run, mark)
        Image.new("L", (8, 8)).save(run / "image.png")
        yield run


def _within(*arguments: str) -> Door:
    """A command in the folder of the run, which is also where modules are looked for."""

    def run(path: Path, address: str) -> object:
        os.chdir(path)
        sys.path.insert(0, str(path))
        importlib.invalidate_caches()
        return main(list(arguments))

    return run


FAST = ("--trainer.fast_dev_run=1", "--trainer.enable_progress_bar=false")
DOORS: dict[str, Door] = {
    "linvit evaluate": _within("evaluate", ".", "--num_workers=0", "--output=../out"),
    "linvit predict --model": _within("predict", "--model", ".", "image.png", "--output=../out"),
    "linvit push": _within("push", ".", "--to", "../pushed", "--license=mit"),
    "linvit analyze RUN": _within("analyze", "--ckpt_path", ".", "--count=1", "--output=../out"),
    "linvit probe": _within("probe", ".", "--layers=-1", "--output=../out"),
    "linvit linearize --teacher": _within("linearize", "--teacher=.", "--model.attention=linear", *FAST),
    "linvit compare --report": _within("compare", "--report", "."),
    "linvit fit --model.pretrained=RUN": lambda path, address: main(
        ["fit", f"--config={QUICKSTART}", *tiny(), *FAST, f"--model.pretrained={path}"]
    ),
    "linvit.load": lambda path, address: linvit.load(path) and None,
}
