"""What a task learns from besides its labels: a trained network of which its own is a copy with another attention."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from linvit.errors import UserError, check_choice, check_number, quote_first
from linvit.io.files import resume_command
from linvit.linearization.distillation import Distillation, Matching, kind_of
from linvit.linearization.student import linearize
from linvit.registry.signatures import check_choices
from linvit.tasks.execution import freeze_parameters
from linvit.tasks.pretrained import checkpoint_follows
from linvit.tasks.safe_loading import opened

if TYPE_CHECKING:
    from linvit.tasks.base import Task

MOST = 0.9  # of the weights of its network a teacher must have
TEACHER, START, DISTANCE = "teacher/", "start/", "distance/"
"""How the curves of a run begin that are its teacher's, its own before any step, and its layers' relative errors."""


@dataclass(frozen=True)
class Teacher(Matching):
    """The option `teacher` of a task, as a mapping of these; a string is its `source`.

    Args:
        source: The teacher's weights: a source of `linvit.load_pretrained`. Of a checkpoint of linvit those that
            predict are taken, and its attention. On the command line also the folder of a run, of which the best
            checkpoint is taken, or of several runs, of which the newest is. None: the weights that the backbone brings,
            such as `{name: timm, model: ..., pretrained: true}`.
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
        check_choices(Teacher, vars(self))
        check_number("task_weight", self.task_weight, at_least=0)
        if not self.task_weight and not any(self.weights.values()):
            raise UserError("nothing is learned: task_weight and all weights of the teacher's parts are 0")

    @property
    def untrained(self) -> bool:
        """Whether the weights are those that `config` trains, and are not there yet."""
        if self.source is None or self.config is None:
            return False
        return Path(self.source).name == Path(self.config).stem and not Path(self.source).is_file()

    @classmethod
    def of(cls, option: str | Mapping[str, Any]) -> "Teacher":
        """Reads the option."""
        options = {"source": option} if isinstance(option, str) else dict(option)
        for name in options:
            check_choice("an option of teacher", name, [field.name for field in fields(cls)])
        return cls(**options)


class TaskDistillation(Distillation):
    """The distance of a task's network to its teacher: loads the teacher, and copies its weights into the network."""

    def __init__(self, task: "Task", option: Teacher) -> None:
        teacher = teacher_network(task, option)
        attention = task.hparams["attention"]
        if attention is None:
            raise UserError("a student needs another attention than its teacher's: set --model.attention")
        copied = linearize(teacher, attention, task.hparams["img_size"]).state_dict()
        super().__init__(teacher, task.network, option)
        self.task, self.option = task, option
        inside = tuple(f"{name}." for name in self.layers)
        parts = {"all": (True, False), "attention": (True,), "mlp": (False,), "nothing": ()}[option.copied]
        chosen = {name: value for name, value in copied.items() if name.startswith(inside) in parts}
        task.network.load_state_dict(chosen, strict=False)
        if task.ema is not None:
            task.ema.network.load_state_dict(task.network.state_dict())
        if task.hparams["compile"]:
            teacher.compile()
        known = {name: parameter.shape for name, parameter in teacher.named_parameters()}
        # names of the network's parameters that its teacher does not have in this shape
        self.new = [name for name, own in task.network.named_parameters() if known.get(name) != own.shape]
        self.fingerprint = fingerprint(teacher)
        rank_zero_info(
            f"teacher: {option.source or 'the weights of the backbone'}. {len(self.layers)} attention layers are "
            f"matched. New parameters of the student: {quote_first(self.new) if self.new else 'none'}"
        )
        own, theirs = (network.get_submodule(self.layers[0]) for network in (task.network, teacher))
        if kind_of(own) == kind_of(theirs):
            rank_zero_warn(
                f"the student has its teacher's attention, {json.dumps(attention)}, in every layer: nothing is "
                f"converted. Name another one with --model.attention, unless this is the run to compare with"
            )
        if not option.task_weight or (option.attention_inputs == "teacher" and any(option.weights.values())):
            unreached = self.unreached(task.example_images, by_outputs=bool(option.task_weight))
            if option.task_weight and hasattr(task.network, "backbone"):  # its head has a loss of its own
                unreached = [name for name in unreached if name.startswith("backbone.")]
            if unreached:
                rank_zero_info("parameters that no loss depends on are frozen")
                task.frozen = freeze_parameters(task.network, unreached)  # DDP waits for gradients of all others

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the task learns from no teacher until it is fitted."""
        return type(None), ()

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """The weighted sum of the task's loss for a batch and of what is matched, which the task logs."""
        weight, task = self.option.task_weight, self.task
        if not any(self.matching.weights.values()):
            return weight * task.training_loss(batch)
        if not weight:
            self.run(batch["image"])
        own = weight * task.training_loss(batch) if weight else 0.0
        parts = self.parts()
        task.log_dict({f"train/teacher_{part}": value.detach() for part, value in parts.items()})
        return own + self.weighted(parts)

    def validate(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs how far attention layers are from the teacher's on the first batch; scores the teacher at the start."""
        task = self.task
        if batch_idx == 0:  # of each rank; one whose share is empty logs nothing, and none waits for another
            found = self.distances(batch["image"])["attention"]
            task.log_dict({f"{DISTANCE}{name}": value for name, value in found.items()}, batch_size=1)
        if task.trainer.sanity_checking:
            metrics: Any = task.metrics[TEACHER]
            task.score_batch(self.teacher, batch, metrics)
            task.log(f"{TEACHER}score", metrics[task.score_metric], batch_size=len(batch["image"]))

    def log_start(self) -> None:
        """Logs at step 0 the teacher's score and, before any step, the student's score and its distances.

        A resumed run keeps those of its student, which has been trained since.
        """
        found, names = self.task.trainer.callback_metrics, {f"{TEACHER}score": f"{TEACHER}score"}
        if self.task.trainer.global_step == 0:
            names |= {"val/score": f"{START}score"}
            names |= {tag: f"{START}{tag}" for tag in found if tag.startswith(DISTANCE)}
        for logger in self.task.loggers:
            logger.log_metrics({to: found[tag].item() for tag, to in names.items() if tag in found}, step=0)


def kept_attention(attention: Any, teacher: Teacher) -> Any:
    """A student's option `attention`, with that of its teacher where a list has None."""
    if not isinstance(attention, list | tuple) or None not in attention or checkpoint_follows():
        return attention
    theirs = given_options(teacher).get("attention")
    each = theirs if isinstance(theirs, list | tuple) else [theirs] * len(attention)
    if len(each) != len(attention):
        raise UserError(
            f"null keeps the teacher's attention, but --model.attention lists {len(attention)} and the teacher has "
            f"{len(each)}: {json.dumps(each)}. Give one for each of these, or name what is kept"
        )
    return [kept if own is None else own for own, kept in zip(attention, each, strict=True)]


def teacher_network(task: "Task", teacher: Teacher) -> nn.Module:
    """The task's network with the teacher's attention and weights, for images of the task's size."""
    options = {**task.hparams, "attention": None, "teacher": None, "pretrained": None, "freeze": None}
    options |= {"ema_decay": None, "predict_with": "raw", "compile": False, "grad_checkpointing": False}
    options.pop("mesa", None)  # which needs the moving average
    if teacher.source is None:
        backbone = task.hparams["backbone"]
        if not isinstance(backbone, Mapping) or not backbone.get("pretrained"):
            raise UserError(
                "the teacher has no trained weights: name a file of them, --model.teacher.source=FILE, or a backbone "
                "that brings them, --model.backbone='{name: timm, model: MODEL, pretrained: true}'"
            )
        return type(task)(**options).network
    if teacher.untrained:
        raise UserError(
            f"the teacher '{teacher.source}' has not been trained to its end. linvit linearize does that first, and so "
            f"does\n  {resume_command(Path(str(teacher.config)))}"
        )
    from linvit.weights.load import load_pretrained  # knows the layouts of all official checkpoints

    given = given_options(teacher)
    options["attention"] = given.get("attention")
    network = type(task)(**options).network
    averaged = given.get("predict_with") == "ema" if given else None
    report = load_pretrained(network, teacher.source, ema=averaged, min_fraction=0)
    lacking = report.missing | dict.fromkeys(report.unexpected, "not in the model")
    other = [name for name in lacking if name.endswith("attn.proj.weight")]  # one of another depth or width
    if other or report.fraction < MOST:
        name = other[0] if other else next(iter(lacking))
        whose = f", {json.dumps(given['backbone'])}" if given else ""
        raise UserError(
            f"the teacher {teacher.source} is not of the backbone {task.hparams['backbone']}: {name} "
            f"({lacking[name]}). Set --model.backbone to that of the teacher{whose}"
        )
    new = report.missing | report.initialised
    if new:
        name, reason = next(iter(new.items()))
        lacks = f"{len(new)} of the teacher's tensors are not in {teacher.source}: {name} ({reason})"
        if report.initialised and teacher.logit_weight:
            raise UserError(f"{lacks}, so it has no logits to match; set logit_weight: 0")
        rank_zero_warn(f"{lacks}, so its score says little")
    return network


def given_options(teacher: Teacher) -> dict[str, Any]:
    """Returns the options of the task that has trained a teacher; none unless its source is a linvit checkpoint."""
    if teacher.source is None or not teacher.source.endswith(".ckpt"):
        return {}
    with opened(teacher.source) as (_, options):
        return options


def fingerprint(network: nn.Module) -> str:
    """SHA-256 of the names and values of a network's weights, in 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
