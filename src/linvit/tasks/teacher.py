"""Distillation: a task also learns from a trained network; its own is a copy with another attention."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from linvit.errors import UserError, check_choice, check_number, quote_first
from linvit.io.files import resume_command
from linvit.linearization.distillation import Distillation, Matching, kind_of
from linvit.linearization.student import linearize
from linvit.registry.signatures import check_choices
from linvit.tasks.execution import OF_TRAINING, freeze_parameters
from linvit.tasks.pretrained import checkpoint_follows
from linvit.tasks.safe_loading import opened

MOST = 0.9  # of the weights of its network a teacher must have
TEACHER, START, DISTANCE = "teacher/", "start/", "distance/"
"""Prefixes of the curves of a run: its teacher's, its own before any step, and its layers' relative errors."""


@dataclass(frozen=True)
class Teacher(Matching):
    """The option `teacher` of a task: a mapping of these arguments, or a string, the `source`.

    Args:
        source: The teacher's weights: a source of `linvit.load_pretrained`. Of a checkpoint of linvit those that
            predict are taken, and its attention. On the command line also the folder of a run, to use its best
            checkpoint, or of several runs, to use the newest. None: the pretrained weights of the backbone,
            such as `{name: timm, model: ..., pretrained: true}`.
        config: The configuration that trains the teacher, which `linvit linearize` does where there is no `source`.
        copied: Weights that the student copies: "all" of the teacher that fit; only its "attention"
            layers; "mlp", all but these; or "nothing".
        task_weight: Weight of the task's own loss. 0 needs no labels, and trains by matching alone.
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
        """True if `config` trains the weights and they do not exist yet."""
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


class TaskDistillation(Callback):
    """Trains a task beside its teacher, if it has one. A copy of the task has no teacher until it is fitted.

    Attributes:
        distance: Compares the task's network with its teacher while it is fitted, else None.
    """

    distance: Distillation | None = None
    fingerprint: str
    new: Sequence[str]

    def load(self, task: Any) -> None:
        """Loads a task's teacher, if it has one, until the end of the next run; copies its weights into the network."""
        option: Teacher | None = task.teacher
        if option is None or self.distance is not None:
            return
        teacher, attention = teacher_network(task, option), task.hparams["attention"]
        if attention is None:
            raise UserError("a student needs another attention than its teacher's: set --model.attention")
        copied = linearize(teacher, attention, task.hparams["img_size"]).state_dict()
        distance = Distillation(teacher, task.network, option)
        inside = tuple(f"{name}." for name in distance.layers)
        parts = {"all": (True, False), "attention": (True,), "mlp": (False,), "nothing": ()}[option.copied]
        chosen = {name: value for name, value in copied.items() if name.startswith(inside) in parts}
        task.network.load_state_dict(chosen, strict=False)
        if task.ema is not None:
            task.ema.network.load_state_dict(task.network.state_dict())
        if task.execution.compile:
            teacher.compile()
        known = {name: parameter.shape for name, parameter in teacher.named_parameters()}
        # names of the network's parameters that its teacher does not have in this shape
        self.new = [name for name, own in task.network.named_parameters() if known.get(name) != own.shape]
        self.fingerprint = fingerprint(teacher)
        rank_zero_info(
            f"teacher: {option.source or 'the weights of the backbone'}. {len(distance.layers)} attention layers are "
            f"matched. New parameters of the student: {quote_first(self.new) if self.new else 'none'}"
        )
        own, theirs = (network.get_submodule(distance.layers[0]) for network in (task.network, teacher))
        if kind_of(own) == kind_of(theirs):
            rank_zero_warn(
                f"the student has its teacher's attention, {json.dumps(attention)}, in every layer: nothing is "
                f"converted. Name another one with --model.attention, unless this is the run to compare with"
            )
        if not option.task_weight or (option.attention_inputs == "teacher" and any(option.weights.values())):
            unreached = distance.unreached(task.example_images, by_outputs=bool(option.task_weight))
            if option.task_weight and hasattr(task.network, "backbone"):  # the task's loss trains its head
                unreached = [name for name in unreached if name.startswith("backbone.")]
            if unreached:
                rank_zero_info("parameters that no loss depends on are frozen")
                task.frozen = freeze_parameters(task.network, unreached)  # DDP waits for gradients of all others
        self.distance = distance

    def teardown(self, *_: Any, **__: Any) -> None:
        """Frees the teacher, at the end of a run or before."""
        if self.distance is not None:
            self.distance.close()
            self.distance = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def lr_scales(self, scale: float) -> dict[str, float]:
        """Returns the factors on the learning rate of parameters that the teacher does not have, by their names."""
        if scale == 1:
            return {}
        if self.distance is None:
            raise UserError("new_lr_scale is for the parameters that a teacher does not have: set --model.teacher")
        rank_zero_info(f"learning rate x {scale:g} for {len(self.new)} tensors of parameters: {quote_first(self.new)}")
        return {f"network.{name}": scale for name in self.new}

    def training_loss(self, task: Any, batch: dict[str, Any]) -> Tensor:
        """Returns the task's loss; with a teacher the weighted sum of it and the matching loss, which is logged."""
        if self.distance is None:
            return task.training_loss(batch)  # type: ignore[no-any-return]
        weight = task.teacher.task_weight
        loss: Any = weight * task.training_loss(batch) if weight else 0.0
        if not any(self.distance.matching.weights.values()):
            return loss  # type: ignore[no-any-return]
        if not weight:
            self.distance.run(batch["image"])
        parts = self.distance.parts()
        task.log_dict({f"train/teacher_{part}": value.detach() for part, value in parts.items()})
        return loss + self.distance.weighted(parts)  # type: ignore[no-any-return]

    def validate(self, task: Any, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs how far attention layers are from the teacher's on the first batch; scores the teacher at the start."""
        if self.distance is None:
            return
        if batch_idx == 0:  # of each rank; one whose share is empty logs nothing, and none waits for another
            found = self.distance.distances(stacked(batch["image"]))["attention"]
            task.log_dict({f"{DISTANCE}{name}": value for name, value in found.items()}, batch_size=1)
        if task.trainer.sanity_checking:
            metrics: Any = task.metrics[TEACHER]
            task.score_batch(self.distance.teacher, batch, metrics)
            task.log(f"{TEACHER}score", metrics[task.score_metric], batch_size=len(batch["image"]))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Loads the teacher; has the check before training score both networks on all images."""
        if stage == "fit":
            self.load(pl_module)
            if self.distance is not None and trainer.num_sanity_val_steps:
                trainer.num_sanity_val_steps = float("inf")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs at step 0 the teacher's score and, before any step, the student's score and its distances.

        A resumed run keeps those of its student, which has been trained since.
        """
        if self.distance is None or not trainer.sanity_checking:
            return
        found, names = trainer.callback_metrics, {f"{TEACHER}score": f"{TEACHER}score"}
        if trainer.global_step == 0:
            names |= {"val/score": f"{START}score"}
            names |= {tag: f"{START}{tag}" for tag in found if tag.startswith(DISTANCE)}
        for logger in trainer.loggers:
            logger.log_metrics({to: found[tag].item() for tag, to in names.items() if tag in found}, step=0)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the identity of the teacher's weights."""
        if self.distance is not None:
            checkpoint["teacher_sha256"] = self.fingerprint

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raises a `UserError` if a run is resumed with another teacher."""
        if self.distance is not None and checkpoint.get("teacher_sha256") != self.fingerprint:
            raise UserError(
                f"the run that is resumed learned from another teacher than {pl_module.hparams['teacher']!r}; set "
                f"--model.teacher to the one that it had, or start a new run"
            )


def stacked(images: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns a batch as it is, and images (C, h, w) of several sizes as one, with zeros to the right and below."""
    if isinstance(images, Tensor):
        return images
    from linvit.heads.detection.detector import pad_and_stack  # a classification needs no detectors

    return pad_and_stack(images)


def fill_from_teacher(attention: Any, teacher: Teacher | None) -> Any:
    """Returns a student's option `attention`, with that of its teacher where a list has None."""
    if teacher is None or not isinstance(attention, list | tuple) or None not in attention or checkpoint_follows():
        return attention
    theirs = given_options(teacher).get("attention")
    each = theirs if isinstance(theirs, list | tuple) else [theirs] * len(attention)
    if len(each) != len(attention):
        raise UserError(
            f"null keeps the teacher's attention, but --model.attention lists {len(attention)} and the teacher has "
            f"{len(each)}: {json.dumps(each)}. Give one for each of these, or name what is kept"
        )
    return [kept if own is None else own for own, kept in zip(attention, each, strict=True)]


def teacher_network(task: Any, teacher: Teacher) -> nn.Module:
    """Returns the task's network with the teacher's attention and weights, for images of the task's size."""
    backbone = task.hparams["backbone"]
    if teacher.source is None and not (isinstance(backbone, Mapping) and backbone.get("pretrained")):
        raise UserError(
            "the teacher has no trained weights: name a file of them, --model.teacher.source=FILE, or a backbone that "
            "brings them, --model.backbone='{name: timm, model: MODEL, pretrained: true}'"
        )
    if teacher.untrained:
        raise UserError(
            f"the teacher '{teacher.source}' has not been trained to its end. linvit linearize does that first, and so "
            f"does\n  {resume_command(Path(str(teacher.config)))}"
        )
    given = given_options(teacher)
    options = {name: value for name, value in task.hparams.items() if name not in OF_TRAINING}
    network: nn.Module = type(task)(**{**options, "attention": given.get("attention")}).network
    if teacher.source is None:
        return network
    from linvit.weights.load import load_pretrained  # knows the layouts of all official checkpoints

    averaged = given.get("predict_with") == "ema" if given else None
    report = load_pretrained(network, teacher.source, ema=averaged, min_fraction=0)
    lacking = report.missing | dict.fromkeys(report.unexpected, "not in the model")
    other = [name for name in lacking if name.endswith("attn.proj.weight")]  # one of another depth or width
    if other or report.fraction < MOST:
        name = other[0] if other else next(iter(lacking))
        whose = f", {json.dumps(given['backbone'])}" if given else ""
        raise UserError(
            f"the teacher {teacher.source} is not of the backbone {backbone}: {name} "
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
    """Returns the SHA-256 of the names and values of a network's weights, in 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
