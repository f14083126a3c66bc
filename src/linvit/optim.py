"""Parameter groups and learning-rate schedules: plain code, one place."""

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
    body_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups for an optimiser: decayed weights and what is never decayed, apart for every layer if the rate differs.

    Not decayed: 1-D tensors (norms, biases) and whatever a submodule names in its `no_weight_decay()`. Layer-wise
    decay (ELECTRA, Clark et al. 2020; BEiT, Bao et al. 2022) multiplies the rate by `layer_decay` once per layer down
    from the last, for submodules that tell their layers (`group_matcher`, timm's contract); the rest keeps the rate.
    What is not the classifier of a submodule that tells it (`get_classifier`, the same contract) has a peak of its own,
    `body_lr_scale` times the classifier's, as in CSWin's fine-tuning (Dong et al. 2022).

    Args:
        model: Whose trainable parameters are grouped.
        lr: Peak learning rate of the last layer.
        weight_decay: Of the decayed groups.
        layer_decay: Factor per layer, in (0, 1]; None is 1.
        body_lr_scale: Factor on the peak of all but the classifier.
    """
    spared: set[str] = set()
    scales: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if callable(getattr(module, "no_weight_decay", None)):
            spared |= {start + name for name in module.no_weight_decay()}
        if layer_decay is not None and callable(getattr(module, "group_matcher", None)):
            layers = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
            last = max(layers.values())
            scales |= {start + name: layer_decay ** (last - layer) for name, layer in layers.items()}
        if body_lr_scale != 1 and callable(getattr(module, "get_classifier", None)):
            head = _classifier(module)
            peaks |= {
                start + name: body_lr_scale
                for name, parameter in module.named_parameters()
                if id(parameter) not in head
            }
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale, peak = scales.get(name, 1.0), peaks.get(name, 1.0)
            decayed = parameter.ndim > 1 and name not in spared
            decay = weight_decay if decayed else 0.0
            empty = {"params": [], "lr": lr * peak * scale, "peak_scale": peak, "weight_decay": decay}
            groups.setdefault((-peak, -scale, not decayed), empty)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _classifier(module: nn.Module) -> set[int]:
    """The ids of the parameters of a module's classifier, or classifiers."""
    found = module.get_classifier()  # type: ignore[operator]
    parts = found if isinstance(found, tuple | list) else (found,)
    return {id(parameter) for part in parts for parameter in part.parameters()}


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up, half a cosine, and the last rate from there on (cool-down).

    The cosine is not shifted by the warm-up, as in the DeiT, Swin and FLatten recipes: the rate steps down slightly
    (factor 0.989 for 20 of 300 epochs) where the warm-up ends.

    Attributes:
        peak: Rate that the warm-up aims at.
        start: Rate at 0.
        end: Rate at the end of the cosine, and of the cool-down.
        warmup: Length of the warm-up, in epochs.
        total: Length of warm-up and cosine, in epochs.
        steps_per_epoch: Optimiser steps per epoch.
        interval: The rate changes with every "step", or only with every "epoch".
        lag: By how many intervals the rate trails its formula: 1 where a recipe's program computes the rate after the
            update, or after the epoch, for the next one.
    """

    peak: float
    start: float
    end: float
    warmup: float
    total: float
    steps_per_epoch: float
    interval: Literal["step", "epoch"] = "step"
    lag: int = 0

    def at(self, epoch: float) -> float:
        """The formula: the rate at a time in epochs."""
        if epoch < self.warmup:
            return self.start + (self.peak - self.start) * epoch / self.warmup
        if epoch >= self.total:
            return self.end
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * epoch / self.total)) / 2

    def __call__(self, step: int) -> float:
        """The rate of the update that comes after `step` optimiser steps."""
        if self.interval == "step":
            return self.at(max(step - self.lag, 0) / self.steps_per_epoch)
        # A small share of a step, lest rounding in steps_per_epoch push the last step of an epoch into the next.
        return self.at(max(math.floor((step + 1e-3) / self.steps_per_epoch) - self.lag, 0))

    def scheduler(self, optimizer: Optimizer, keeps: Literal["epoch", "step"] = "epoch") -> LambdaLR:
        """To be stepped after every optimiser step; a group whose rate is a share of the peak keeps its share.

        A group with a `peak_scale` starts and ends with the others, and has only the peak in between to itself.

        Args:
            optimizer: Its groups have their peaks as rates.
            keeps: What a continued run keeps if its epochs have more or fewer steps than before: its place in "epoch"s,
                where those end the run, or in "step"s.
        """
        return _Rates(optimizer, self, keeps)

    def share(self, step: int) -> float:
        """The rate of the update that comes after `step` optimiser steps, over the peak."""
        return self(step) / self.peak


class _Rates(LambdaLR):
    """The rates of a schedule. A continued run takes its place from the checkpoint, and the rates from its schedule.

    LambdaLR's own `load_state_dict` brings back the peaks of the first run, which had perhaps another total batch.
    """

    def __init__(self, optimizer: Optimizer, schedule: WarmupCosine, keeps: Literal["epoch", "step"]) -> None:
        self.steps_per_epoch, self.keeps = schedule.steps_per_epoch, keeps
        peaks = [schedule.peak * group.get("peak_scale", 1.0) for group in optimizer.param_groups]
        super().__init__(optimizer, [replace(schedule, peak=peak).share for peak in peaks])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To be called after the optimiser's, whose rates it sets."""
        own = {"base_lrs": self.base_lrs, "steps_per_epoch": self.steps_per_epoch, "keeps": self.keeps}
        before = state_dict.get("steps_per_epoch", self.steps_per_epoch)
        longer = self.steps_per_epoch / before if self.keeps == "epoch" else 1
        super().load_state_dict({**state_dict, **own, "last_epoch": round(state_dict["last_epoch"] * longer)})
        self._last_lr = [
            peak * share(self.last_epoch) for peak, share in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, peak, rate in zip(self.optimizer.param_groups, self.base_lrs, self._last_lr, strict=True):
            group["initial_lr"], group["lr"] = peak, rate
