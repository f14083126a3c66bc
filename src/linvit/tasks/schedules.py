"""Learning-rate schedules: a warm-up, then a decay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class Schedule:
    """A learning rate over a run. A subclass gives the formula (`at`)."""

    peak: float  # that the warm-up aims at
    start: float  # at 0
    end: float  # of the decay, and in the cool-down
    warmup: float  # length, in epochs
    total: float  # length of warm-up and decay, in epochs
    steps_per_epoch: float  # of the optimiser
    interval: Literal["step", "epoch"] = "step"  # whether it changes with every step, or only with every epoch
    # By how many intervals it lags behind its formula: 1 where a recipe's program computes it after the update, or
    # after the epoch, for the next one.
    delay: int = 0

    def at(self, epoch: float) -> float:
        """Returns the formula: the learning rate at a time in epochs."""
        raise NotImplementedError

    def warmed(self, decayed: float, epoch: float) -> float:
        """Returns a decayed learning rate times a factor that rises linearly from `start / peak` to 1 in warm-up."""
        if epoch >= self.warmup:
            return decayed
        return decayed * (1 - (1 - epoch / self.warmup) * (1 - self.start / self.peak))

    def __call__(self, step: int) -> float:
        """Returns the learning rate of the update that follows `step` optimiser steps."""
        if self.interval == "step":
            return self.at(max(step - self.delay, 0) / self.steps_per_epoch)
        # The small fraction of a step keeps rounding in steps_per_epoch from moving a step to the wrong epoch.
        return self.at(max(math.floor((step + 1e-3) / self.steps_per_epoch) - self.delay, 0))

    def scheduler(self, optimizer: Optimizer, keeps: Literal["epoch", "step"] = "epoch") -> LambdaLR:
        """Builds a torch scheduler, stepped after every optimiser step. The groups' learning rates are their peaks.

        A group whose peak is a fraction of the schedule's follows it at that fraction. A group with a `peak_scale`
        has another peak, but the start and the end of the schedule. A resumed run whose epochs have more or fewer steps
        than before keeps its position in epochs, where those end the run, or in steps.
        """
        return _ScheduleLR(optimizer, self, keeps)

    def fraction(self, step: int) -> float:
        """Returns the learning rate of the update that follows `step` optimiser steps, over the peak."""
        return self(step) / self.peak


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, half a cosine, then the last learning rate (cool-down).

    The cosine is not shifted by the warm-up, as in the DeiT, Swin and FLatten recipes: the learning rate steps down
    slightly (factor 0.989 for 20 of 300 epochs) where the warm-up ends. With `shifted` it begins there.
    """

    shifted: bool = False

    def at(self, epoch: float) -> float:
        """Returns the formula: the learning rate at a time in epochs."""
        if epoch < self.warmup:
            return self.start + (self.peak - self.start) * epoch / self.warmup
        if epoch >= self.total:
            return self.end
        begin = self.warmup if self.shifted else 0.0
        place = (epoch - begin) / (self.total - begin)
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * place)) / 2


@dataclass(frozen=True)
class WarmupPoly(Schedule):
    """Polynomial decay `end + (peak - end) (1 - t / total)^power`, the schedule of mmsegmentation's recipes.

    The warm-up is a factor on the decayed learning rate, which grows linearly from `start / peak` to 1, so the peak
    itself is never reached.
    """

    power: float = 1.0  # 1 decays linearly

    def at(self, epoch: float) -> float:
        """Returns the formula: the learning rate at a time in epochs."""
        if epoch >= self.total:
            return self.end
        return self.warmed(self.end + (self.peak - self.end) * (1 - epoch / self.total) ** self.power, epoch)


@dataclass(frozen=True)
class WarmupSteps(Schedule):
    """The learning rate falls by a factor after each of some epochs, but not below its end: mmdetection's recipes.

    The warm-up is a factor on it, which grows linearly from `start / peak` to 1.
    """

    epochs: Sequence[float] = ()  # after which it falls
    factor: float = 0.1  # by which it is multiplied

    def at(self, epoch: float) -> float:
        """Returns the formula: the learning rate at a time in epochs."""
        if epoch >= self.total:
            return self.end
        fallen = self.peak * self.factor ** sum(epoch >= start for start in self.epochs)
        return self.warmed(max(fallen, self.end), epoch)


@dataclass(frozen=True)
class CosineCycles(WarmupCosine):
    """Half cosines one after another, after a linear warm-up that does not shift them.

    Each starts at the peak (Loshchilov and Hutter 2017, "SGDR"), as in torch's `CosineAnnealingWarmRestarts`; of a
    `wave` every other rises again, as `CosineAnnealingLR` does beyond its `T_max`.
    """

    cycle: float = 10  # epochs of the first half cosine
    growth: float = 1  # length of each over that of the one before
    wave: bool = False

    def at(self, epoch: float) -> float:
        """Returns the formula: the learning rate at a time in epochs."""
        if epoch < self.warmup or epoch >= self.total:
            return super().at(epoch)
        start, length, falls = 0.0, self.cycle, True
        while epoch >= start + length:
            start, length, falls = start + length, length * self.growth, not (self.wave and falls)
        place = (epoch - start) / length if falls else 1 - (epoch - start) / length
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * place)) / 2


class _ScheduleLR(LambdaLR):
    """Follows a schedule. A resumed run takes its position from the checkpoint, and learning rates from its schedule.

    LambdaLR's own `load_state_dict` would restore the peaks of the first run, which may have had another batch size.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, keeps: Literal["epoch", "step"]) -> None:
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
