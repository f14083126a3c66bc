"""Settings of a task that make no sense, told before anything is built."""

from collections.abc import Mapping
from typing import Any

from linvit.errors import check_choice, check_number


def check_optimisation(hp: Mapping[str, Any]) -> None:
    """Raises a `UserError` for a setting of the optimiser or the schedule that makes no sense."""
    check_number("lr", hp["lr"], above=0)
    for name in ("min_lr", "warmup_lr", "weight_decay", "warmup_epochs", "cooldown_epochs"):
        check_number(name, hp[name], at_least=0)
    check_number("lr_lag", hp["lr_lag"], at_least=0, whole=True)
    check_choice("lr_interval", hp["lr_interval"], ["step", "epoch"])
    check_choice("lr_scaled", hp["lr_scaled"], ["all", "peak"])
    for name in ("lr_batch", "published_batch"):
        if hp[name] is not None:
            check_number(name, hp[name], at_least=1, whole=True, note=", such as 512, or null for none")
    if hp["layer_decay"] is not None:
        check_number("layer_decay", hp["layer_decay"], above=0, at_most=1, note=", such as 0.75, or null for none")
    check_number("body_lr_scale", hp["body_lr_scale"], above=0)
