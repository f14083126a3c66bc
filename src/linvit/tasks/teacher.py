"""What a task learns from besides its labels: a trained network of which its own is a copy with another attention."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from linvit.errors import UserError, check_choice, check_number
from linvit.linearization.distillation import Distillation, Matching
from linvit.linearization.student import linearize
from linvit.tasks.safe_loading import opened
from linvit.weights import torch_file

if TYPE_CHECKING:
    from linvit.tasks.base import Task


@dataclass(frozen=True)
class Teacher(Matching):
    """The option `teacher` of a task, as a mapping of these; a string is its `source`.

    Args:
        source: The teacher's weights: a run's folder, a checkpoint, or a source of `linvit.load_pretrained`. Of a run
            the best weights that predict are taken, and its attention; of a folder of runs the newest. None: the
            weights that the backbone brings, such as `{name: timm, model: ..., pretrained: true}`.
        config: The configuration that trains the teacher, which `linvit linearize` does where there is no `source`.
        copied: What the student starts from: "all" of the teacher that it has a place for; only its "attention"
            layers; "mlp", all but these; or "nothing".
        task_weight: Weight of the task's own loss. 0 needs no labels, and trains what is matched alone.
    """

    source: str | None = None
    config: str | None = None
    copied: Literal["all", "attention", "mlp", "nothing"] = "all"
    task_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("copied", self.copied, ["all", "attention", "mlp", "nothing"])
        check_number("task_weight", self.task_weight, at_least=0)
        if not self.task_weight and not any(self.weights.values()):
            raise UserError("nothing is learned: task_weight and all weights of the teacher's parts are 0")

    @classmethod
    def of(cls, option: str | Mapping[str, Any]) -> "Teacher":
        """Reads the option.

        Raises:
            UserError: If a name or value is not allowed.
        """
        options = {"source": option} if isinstance(option, str) else dict(option)
        for name in options:
            check_choice("an option of teacher", name, [field.name for field in fields(cls)])
        return cls(**options)


def learn_from(task: "Task", teacher: Teacher) -> Distillation:
    """Loads the teacher, copies its weights into the task's network, and has the two compared.

    Raises:
        UserError: If the teacher cannot be loaded, or is of another network than the task's.
    """
    network = teacher_network(task, teacher)
    student = copied_student(task, network).state_dict()
    distillation = Distillation(network, task.network, teacher)
    inside = tuple(f"{name}." for name in distillation.layers)
    wanted = {"all": (True, True), "attention": (True, False), "mlp": (False, True), "nothing": (False, False)}
    of_attention, of_others = wanted[teacher.copied]
    chosen = {n: value for n, value in student.items() if (of_attention if n.startswith(inside) else of_others)}
    task.network.load_state_dict(chosen, strict=False)
    if task.ema is not None:
        task.ema.network.load_state_dict(task.network.state_dict())
    if task.hparams["compile"]:
        network.compile()
    names = new_parameters(network, task.network)
    own = sorted({name.removeprefix(next((part for part in inside if name.startswith(part)), "")) for name in names})
    rank_zero_info(
        f"teacher: {teacher.source or 'the weights of the backbone'}. {len(distillation.layers)} attention layers are "
        f"matched. {len(names)} tensors of the student are not its teacher's{': ' * bool(own)}{', '.join(own)}"
    )
    return distillation


def copied_student(task: "Task", network: nn.Module) -> nn.Module:
    """A copy of the teacher's network with the attention of the task."""
    attention = task.hparams["attention"]
    if attention is None:
        raise UserError("a student needs another attention than its teacher's: set --model.attention, such as focused")
    return linearize(network, attention, task.hparams["img_size"])


def teacher_network(task: "Task", teacher: Teacher) -> nn.Module:
    """The task's network with the teacher's attention and weights, for images of the task's size."""
    options = {**task.hparams, "attention": None, "teacher": None, "pretrained": None, "ema_decay": None}
    options |= {"predict_with": "raw", "compile": False, "grad_checkpointing": False}
    if teacher.source is None:
        return type(task)(**options).network
    if teacher.config is not None and not Path(teacher.source).exists():
        raise UserError(
            f"the teacher '{teacher.source}' is not there yet. Train it first, linvit fit --config {teacher.config}, "
            f"or have linvit linearize do so"
        )
    from linvit.weights.load import load_pretrained  # knows the layouts of all official checkpoints

    source, ema = best_of_run(teacher.source), None
    if source.endswith(".ckpt"):
        with opened(source) as file:
            given = torch_file.load(file, objects=False)["hyper_parameters"]
        options["attention"], ema = given.get("attention"), given.get("predict_with") == "ema"
        if ema and (average := Path(source).with_name("best_ema.ckpt")).is_file() and source != teacher.source:
            source = str(average)
    network = type(task)(**options).network
    report = load_pretrained(network, source, ema=ema)
    if report.initialised and teacher.logit_weight:
        name, reason = next(iter(report.initialised.items()))
        raise UserError(f"the teacher {source} has no logits to match ({name}: {reason}); set logit_weight: 0")
    rank_zero_info(str(report))
    return network


def best_of_run(source: str) -> str:
    """The best checkpoint of a run's folder, or of the newest run in a folder of several; another source as it is."""
    folder = Path(source)
    if not folder.is_dir():
        return source
    runs = sorted(folder.glob("version_*"), key=lambda run: int(run.name.rpartition("_")[2]))
    found = [path for run in [folder, *runs] if (path := run / "checkpoints" / "best.ckpt").is_file()]
    if not found:
        raise UserError(f"the teacher '{source}' is a folder without a run that has saved its best checkpoint")
    return str(found[-1])


def new_parameters(teacher: nn.Module, student: nn.Module) -> list[str]:
    """The names of the student's parameters that its teacher does not have in this shape."""
    known = {name: parameter.shape for name, parameter in teacher.named_parameters()}
    return [name for name, own in student.named_parameters() if known.get(name) != own.shape]


def fingerprint(network: nn.Module) -> str:
    """SHA-256 of the names and values of a network's weights, in 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
