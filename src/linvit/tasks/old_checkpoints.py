"""Checkpoints of earlier versions: options and weights that have other names today."""

from collections.abc import Iterable, Mapping
from typing import Any

from linvit.errors import UserError

RENAMED_OPTIONS = {
    "lr_batch": "lr_base_batch_size",
    "lr_lag": "lr_delay",
    "lr_scaled": "lr_scaling",
    "published_batch": "published_batch_size",
    "body_lr_scale": "backbone_lr_scale",
    "mix_prob": "mixup_prob",
    "mix_switch": "mixup_switch_prob",
}
BEFORE, NOW = "backbone.", "network."  # what the names of the weights started with, and start with


def refuse_old_names(options: Iterable[str]) -> None:
    """Raises a `UserError` for an option that has another name today."""
    for name in options:
        if name in RENAMED_OPTIONS:
            raise UserError(f"a task takes no option '{name}'. {new_name(name)}")


def new_name(option: str) -> str:
    """A sentence with the name of today of an option, and those of the others that were renamed with it."""
    others = ", ".join(f"{old} is {new}" for old, new in RENAMED_OPTIONS.items() if old != option)
    return f"It is called '{RENAMED_OPTIONS[option]}' now, and {others}"


def upgrade(checkpoint: dict[str, Any]) -> bool:
    """Gives the options and weights of a task's checkpoint the names of today, in place; whether it was an old one."""
    options: Mapping[str, Any] = checkpoint.get("hyper_parameters", {})
    weights: Mapping[str, Any] = checkpoint["state_dict"]
    old_weights = any(name.startswith(BEFORE) for name in weights) and not any(name.startswith(NOW) for name in weights)
    if not old_weights and options.keys().isdisjoint(RENAMED_OPTIONS):
        return False
    checkpoint["hyper_parameters"] = {RENAMED_OPTIONS.get(name, name): value for name, value in options.items()}
    if old_weights:
        checkpoint["state_dict"] = {
            NOW + name.removeprefix(BEFORE) if name.startswith(BEFORE) else name: tensor
            for name, tensor in weights.items()
        }
    return True
