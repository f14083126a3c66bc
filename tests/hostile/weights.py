"""Hostile files of weights and checkpoints."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import linvit
from linvit.cli import main
from linvit.tasks import ClassificationTask
from tests.cli.runs import QUICKSTART, tiny
from tests.training import TINY, batches, tiny_task, trainer
from tests.weights import bombs

SPEC = "{name: deit_tiny, depth: 1, embed_dim: 24, patch_size: 4}"
DIGITS = 10  # classes of the quickstart's data, so that commands come as far as the model
Door = Callable[[Path, str], object]


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return bombs.New, (self.mark,)


def write(folder: Path, mark: Path) -> Iterator[Path]:
    """Writes all files, and yields their paths."""
    for kind, as_file in bombs.FORMATS.items():
        for name, bomb in bombs.BOMBS.items():
            path = folder / f"{kind}-{name.replace(' ', '_')}.ckpt"
            as_file(path, bombs.pickled(bomb(str(mark))))
            yield path
    task = tiny_task(num_classes=DIGITS)
    runner = trainer(folder, max_epochs=0)
    runner.fit(task, batches(8))
    runner.save_checkpoint(folder / "good")
    good = torch.load(folder / "good", weights_only=True)
    options = good["hyper_parameters"]
    (folder / "module_of_a_checkpoint.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom linvit.backbones.deit import deit_tiny as Mine\n", encoding="utf-8"
    )
    path = "module_of_a_checkpoint:Mine"
    call = {"class_path": "os.system", "init_args": {"command": f"touch {mark}"}}
    option = "hyper_parameters"
    changed = {
        "call": {option: {**options, "backbone": {**TINY, "depth": call}}},
        "call_as_text": {option: {**options, "backbone": {**TINY, "depth": json.dumps(call)}}},
        "call_in_attention": {option: {**options, "attention": {"name": "focused", "focusing_factor": call}}},
        "call_in_pretrained": {option: {**options, "pretrained": {"source": call}}},
        "lr": {option: {**options, "lr": "x"}},
        "no_decay": {option: {**options, "no_decay": [{}]}},
        "version": {"pytorch-lightning_version": "garbage"},
        "instantiator": {"hyper_parameters": {**options, "_instantiator": "os.system", "_class_path": f"touch {mark}"}},
        "past_key": {"hparams": {"_instantiator": "os.system"}},
        "past_type": {"hparams_type": "os.system"},
        "backbone_class": {"hyper_parameters": {**options, "backbone": path}},
        "backbone_spec": {"hyper_parameters": {**options, "backbone": {**TINY, "name": path}}},
        "attention_class": {"hyper_parameters": {**options, "attention": path}},
        "attention_list": {"hyper_parameters": {**options, "attention": [{"name": path}]}},
        "hub_model": {"hyper_parameters": {**options, "backbone": {"name": "timm", "model": "hf-hub:a/b"}}},
        "pretrained": {"hyper_parameters": {**options, "pretrained": "http://127.0.0.1:9/x.pth"}},
        "bomb_in_optimizer": {"optimizer_states": [{"state": {0: Bomb(str(mark))}}]},
        "bomb_in_options": {"hyper_parameters": {**options, "lr": Bomb(str(mark))}},
        "bomb_in_callbacks": {"callbacks": {"Bomb": Bomb(str(mark))}},
    }
    for name, parts in changed.items():
        torch.save({**good, **parts}, folder / f"{name}.ckpt")
        yield folder / f"{name}.ckpt"


def _command(verb: str, option: str) -> Door:
    def run(path: Path, address: str) -> object:
        return main([verb, f"--config={QUICKSTART}", *tiny(), f"--{option}={path}"])

    return run


def _trainer(verb: str, remote: bool) -> Door:
    def run(path: Path, address: str) -> None:
        runner = trainer(Path(), max_epochs=2)
        getattr(runner, verb)(
            tiny_task(num_classes=DIGITS), batches(8), ckpt_path=f"{address}/{path.name}" if remote else path
        )

    return run


def _import(path: Path, address: str) -> object:
    return main(["import-weights", str(path), "--backbone", SPEC, "-o", "out.safetensors"])


PYTHON: dict[str, Door] = {
    "load_pretrained": lambda path, address: linvit.load_pretrained(tiny_task().network, path),
    "linvit.load": lambda path, address: linvit.load(path) and None,
    "pretrained": lambda path, address: tiny_task(pretrained=str(path)) and None,
    "import-weights": _import,
    "load_from_checkpoint": lambda path, address: ClassificationTask.load_from_checkpoint(path) and None,
    "load_from_checkpoint, http": (
        lambda path, address: ClassificationTask.load_from_checkpoint(f"{address}/{path.name}") and None
    ),
    **{
        f"Trainer.{verb}{', http' if remote else ''}": _trainer(verb, remote)
        for verb in ("fit", "validate", "test", "predict")
        for remote in (False, True)
    },
}


def _run_of(path: Path) -> Path:
    """A run's folder with the file as its last and best checkpoint."""
    run = Path("checkpoints", "quickstart", "version_0")
    (run / "checkpoints").mkdir(parents=True)
    for name in ("last", "best"):
        shutil.copy(path, run / "checkpoints" / f"{name}.ckpt")
    return run


def _resume(path: Path, address: str) -> object:
    _run_of(path)
    return main(["fit", f"--config={QUICKSTART}", *tiny(), "--resume=auto"])


def _analyze(path: Path, address: str) -> object:
    best = _run_of(path) / "checkpoints" / "best.ckpt"
    raw = f"base: {QUICKSTART}\nmodel: {{init_args: {{predict_with: raw}}}}\n"  # the checkpoint has no average
    Path("raw.yaml").write_text(raw, encoding="utf-8")
    return main(["analyze", f"--ckpt_path={best}", "--config=raw.yaml", "--count=1"])


COMMANDS = {
    f"linvit {verb} --ckpt_path": _command(verb, "ckpt_path") for verb in ("fit", "validate", "test", "predict")
}
COMMANDS["linvit fit --resume=auto"] = _resume
COMMANDS["linvit analyze"] = _analyze
COMMANDS["linvit fit --model.pretrained"] = _command("fit", "model.pretrained")
