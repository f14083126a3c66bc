"""Parameter groups and the learning-rate schedule."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from timm.models import group_parameters
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    layer_decay: float | None = None,
    backbone_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser: with and without weight decay, for each learning rate.

    1-D tensors (norms, biases) are not decayed, nor what a submodule names in its `no_weight_decay()`. Layer-wise
    learning-rate decay (ELECTRA, Clark et al. 2020; BEiT, Bao et al. 2022) multiplies the learning rate by
    `layer_decay` once per layer down from the last, in submodules that group their parameters by layer
    (`group_matcher`, timm's contract); all others keep it. In a submodule with a classifier (`get_classifier`, the same
    contract), all other parameters have `backbone_lr_scale` times the classifier's peak, as in CSWin's fine-tuning
    (Dong et al. 2022).

    Args:
        model: Its trainable parameters are grouped.
        lr: Peak learning rate of the last layer.
        weight_decay: Weight decay of the decayed groups.
        layer_decay: Factor per layer, in (0, 1]; None is 1.
        backbone_lr_scale: Factor on the peak learning rate of all parameters but the classifier's.
    """
    no_decay: set[str] = set()
    scales: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if callable(getattr(module, "no_weight_decay", None)):
            no_decay |= {start + name for name in module.no_weight_decay()}
        if layer_decay is not None and callable(getattr(module, "group_matcher", None)):
            layers = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
            last = max(layers.values())
            scales |= {start + name: layer_decay ** (last - layer) for name, layer in layers.items()}
        if backbone_lr_scale != 1 and callable(getattr(module, "get_classifier", None)):
            head = _classifier(module)
            peaks |= {
                start + name: backbone_lr_scale
                for name, parameter in module.named_parameters()
                if id(parameter) not in head
            }
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale, peak = scales.get(name, 1.0), peaks.get(name, 1.0)
            decayed = parameter.ndim > 1 and name not in no_decay
            decay = weight_decay if decayed else 0.0
            empty = {"params": [], "lr": lr * peak * scale, "peak_scale": peak, "weight_decay": decay}
            groups.setdefault((-peak, -scale, not decayed), empty)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _classifier(module: nn.Module) -> set[int]:
    """The ids of the parameters of a module's classifier or classifiers."""
    found = module.get_classifier()  # type: ignore[operator]
    parts = found if isinstance(found, tuple | list) else (found,)
    return {id(parameter) for part in parts for parameter in part.parameters()}


@dataclass(frozen=True)
class WarmupCosine:
    """Learning-rate schedule: linear warm-up, half a cosine, then the last learning rate (cool-down).

    The cosine is not shifted by the warm-up, as in the DeiT, Swin and FLatten recipes: the learning rate steps down
    slightly (factor 0.989 for 20 of 300 epochs) where the warm-up ends.

    Attributes:
        peak: Learning rate that the warm-up aims at.
        start: Learning rate at 0.
        end: Learning rate at the end of the cosine, and in the cool-down.
        warmup: Length of the warm-up, in epochs.
        total: Length of warm-up and cosine, in epochs.
        steps_per_epoch: Optimiser steps per epoch.
        interval: Whether the learning rate changes with every "step", or only with every "epoch".
        delay: By how many intervals the learning rate lags behind its formula: 1 where a recipe's program computes it
            after the update, or after the epoch, for the next one.
    """

    peak: float
    start: float
    end: float
    warmup: float
    total: float
    steps_per_epoch: float
    interval: Literal["step", "epoch"] = "step"
    delay: int = 0

    def at(self, epoch: float) -> float:
        """The formula: the learning rate at a time in epochs."""
        if epoch < self.warmup:
            return self.start + (self.peak - self.start) * epoch / self.warmup
        if epoch >= self.total:
            return self.end
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * epoch / self.total)) / 2

    def __call__(self, step: int) -> float:
        """The learning rate of the update that follows `step` optimiser steps."""
        if self.interval == "step":
            return self.at(max(step - self.delay, 0) / self.steps_per_epoch)
        # The small fraction of a step keeps rounding in steps_per_epoch from moving a step to the wrong epoch.
        return self.at(max(math.floor((step + 1e-3) / self.steps_per_epoch) - self.delay, 0))

    def scheduler(self, optimizer: Optimizer, keeps: Literal["epoch", "step"] = "epoch") -> LambdaLR:
        """A torch scheduler, to be stepped after every optimiser step.

        A group whose peak is a fraction of the schedule's follows it at that fraction. A group with a `peak_scale`
        has another peak, but the start and the end of the schedule.

        Args:
            optimizer: The learning rates of its groups are their peaks.
            keeps: What a resumed run keeps if its epochs have more or fewer steps than before: its position in
                "epoch"s, where those end the run, or in "step"s.
        """
        return _ScheduleLR(optimizer, self, keeps)

    def fraction(self, step: int) -> float:
        """The learning rate of the update that follows `step` optimiser steps, over the peak."""
        return self(step) / self.peak


class _ScheduleLR(LambdaLR):
    """Follows a schedule. A resumed run takes its position from the checkpoint, and learning rates from its schedule.

    LambdaLR's own `load_state_dict` would restore the peaks of the first run, which may have had another batch size.
    """

    def __init__(self, optimizer: Optimizer, schedule: WarmupCosine, keeps: Literal["epoch", "step"]) -> None:
        self.steps_per_epoch, self.keeps = schedule.steps_per_epoch, keeps
        peaks = [schedule.peak * group.get("peak_scale", 1.0) for group in optimizer.param_groups]
        super().__init__(optimizer, [replace(schedule, peak=peak).fraction for peak in peaks])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To be called after the optimiser's own, since it sets the learning rates of its groups."""
        own = {"base_lrs": self.base_lrs, "steps_per_epoch": self.steps_per_epoch, "keeps": self.keeps}
        before = state_dict.get("steps_per_epoch", self.steps_per_epoch)
        longer = self.steps_per_epoch / before if self.keeps == "epoch" else 1
        super().load_state_dict({**state_dict, **own, "last_epoch": round(state_dict["last_epoch"] * longer)})
        self._last_lr = [
            peak * fraction(self.last_epoch) for peak, fraction in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, peak, lr in zip(self.optimizer.param_groups, self.base_lrs, self._last_lr, strict=True):
            group["initial_lr"], group["lr"] = peak, lr
