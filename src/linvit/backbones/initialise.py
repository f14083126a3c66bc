"""Initial values of a backbone, parameters that its mechanisms share, and its classifier."""

from collections.abc import Callable
from typing import Any

from timm.layers import trunc_normal_
from torch import nn

from linvit.attention.base import Attention


def init_vit(module: nn.Module) -> None:
    """Gives linear layers a vision transformer's initial values; mechanisms keep theirs."""
    if isinstance(module, Attention):
        return
    if isinstance(module, nn.Linear) and not module.weight.is_meta:  # on meta each operation would take a millisecond
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for child in module.children():
        init_vit(child)


def init_convs(module: nn.Module, initialise: Callable[[nn.Conv2d], object], known: Any) -> None:
    """Initialises convolutions, also those of known mechanisms, with zero biases. Other mechanisms are unchanged."""
    if isinstance(module, Attention) and not isinstance(module, known):
        return
    if isinstance(module, nn.Conv2d):
        initialise(module)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for child in module.children():
        init_convs(child, initialise, known)


def tie_mechanisms(network: nn.Module) -> None:
    """Ties parameters of mechanisms to earlier layers by their method `tie`, as Linformer's `share: layerwise`."""
    mechanisms = [module for module in network.modules() if isinstance(module, Attention)]
    for i, mechanism in enumerate(mechanisms):
        if callable(tie := getattr(mechanism, "tie", None)):
            tie(mechanisms[:i])


def classifier(num_features: int, num_classes: int) -> nn.Module:
    """Builds a linear classifier with initial values, or the identity for 0 classes."""
    head = nn.Linear(num_features, num_classes) if num_classes > 0 else nn.Identity()
    init_vit(head)
    return head


def classifiers(model: Any) -> tuple[nn.Module, ...]:
    """Returns the classifiers of `model.get_classifier()`: one, or both of a distilled model; () without the method."""
    found = model.get_classifier() if hasattr(model, "get_classifier") else ()
    return tuple(found) if isinstance(found, tuple | list) else (found,)
