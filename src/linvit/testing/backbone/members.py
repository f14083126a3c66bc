"""The arguments, attributes and methods that timm's contract names."""

import inspect
from typing import Any

from linvit.testing.backbone.images import Subject
from linvit.testing.report import Finding, failed, passed

ARGUMENTS: dict[str, tuple[Any, str]] = {  # name -> default (None: any), what it is for
    "in_chans": (3, "channels of the images"),
    "num_classes": (1000, "classes"),
    "img_size": (None, "side or (H, W) of the images"),
    "drop_path_rate": (0.0, "stochastic depth"),
}
MEMBERS = {
    "num_classes": "classes",
    "num_features": "channels of the last feature",
    "head_hidden_size": "channels of the pooled feature",
    "feature_info": "module, channels and reduction of each feature",
    "forward_features": "images to the last feature",
    "forward_head": "the last feature to logits",
    "forward_intermediates": "features of chosen levels",
    "prune_intermediate_layers": "drops what chosen features do not need",
    "get_classifier": "the classifier",
    "reset_classifier": "replaces the classifier",
    "set_grad_checkpointing": "recomputes activations in the backward pass",
    "group_matcher": "layer groups for layer-wise learning rates",
}
"""`no_weight_decay()`, the names of parameters without weight decay, is optional."""


def constructor(subject: Subject) -> Finding:
    """Checks the constructor's arguments and the model's members, and lists at once all that is missing."""
    arguments = {name: use for name, (_, use) in ARGUMENTS.items() if not subject.takes(name)}
    built = not {"num_classes", "img_size"} & arguments.keys()
    parts = []
    if arguments:
        parts.append(f"its constructor takes no {_listed(arguments)}")
    owner = subject.model if built else subject.constructor
    if built or isinstance(owner, type):
        members = {name: use for name, use in MEMBERS.items() if not hasattr(owner, name) and (built or _method(name))}
        if members:
            parts.append(f"it has no {_listed(members)}")
    if parts:
        return failed(f"{'; '.join(parts)}. linvit.Backbone has all members to inherit")
    for name, (default, _) in ARGUMENTS.items():
        found = subject.parameters.get(name, default)
        if default is not None and found != default:
            said = "no default" if found is inspect.Parameter.empty else f"the default {found!r}"
            return failed(f"{name} has {said} instead of {default!r}")
    attention = subject.parameters.get("attention", inspect.Parameter.empty)
    own = "; no attention" if attention is inspect.Parameter.empty else f", attention={attention!r}"
    return passed(f"{', '.join(ARGUMENTS)}{own}")


def _listed(uses: dict[str, str]) -> str:
    return ", ".join(f"{name} ({use})" for name, use in uses.items())


def _method(name: str) -> bool:
    """Returns whether a member is there on the class, before any instance is built."""
    return not name.startswith(("num_", "head_", "feature_"))
