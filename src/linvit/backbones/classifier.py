"""The linear classifier of a backbone, and where a model has it."""

from typing import Any

from torch import nn

from linvit.backbones.initialise import init_vit


def classifier(num_features: int, num_classes: int) -> nn.Module:
    """Builds a linear classifier with initial values, or the identity for 0 classes."""
    head = nn.Linear(num_features, num_classes) if num_classes > 0 else nn.Identity()
    init_vit(head)
    return head


def classifiers(model: Any) -> tuple[nn.Module, ...]:
    """The classifiers that `model.get_classifier()` returns: one, or both of a distilled model; none without it."""
    found = model.get_classifier() if hasattr(model, "get_classifier") else ()
    return tuple(found) if isinstance(found, tuple | list) else (found,)
