"""What the constructors of mechanisms, backbones and heads take, so that a wrong option is refused before the call."""

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any


def equal_options(given: Any, other: Any) -> bool:
    """Returns whether two options are equal however they are written: a tuple is a list, and a path its name."""
    return json.dumps(given, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


def parameters_of(constructor: Callable[..., Any]) -> dict[str, Any]:
    """Returns parameters of a constructor and defaults, including those that `**kwargs` forward to its parents."""
    return signature(constructor)[0]


def takes(constructor: Callable[..., Any], option: str) -> bool:
    """Returns whether a constructor has this parameter, or `**kwargs` that no parent's signature restricts."""
    parameters, takes_any = signature(constructor)
    return takes_any or option in parameters


def signature(constructor: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Returns parameters with their defaults, and whether the constructor takes others too."""
    if isinstance(constructor, functools.partial):
        parameters, takes_any = signature(constructor.func)
        return dict(list(parameters.items())[len(constructor.args) :]) | constructor.keywords, takes_any
    found: dict[str, Any] = {}
    forwards = False
    for owner in inspect.getmro(constructor) if isinstance(constructor, type) else [constructor]:
        if isinstance(owner, type) and "__init__" not in vars(owner):
            continue
        if owner is object or (owner.__module__, owner.__qualname__) == ("torch.nn.modules.module", "Module"):
            break  # whatever their signatures say, they take nothing
        forwards = False
        own = inspect.signature(vars(owner)["__init__"] if isinstance(owner, type) else owner)
        for parameter in own.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                forwards = forwards or parameter.kind is parameter.VAR_KEYWORD
            elif parameter.name != "self":
                found.setdefault(parameter.name, parameter.default)
        if not forwards:
            break
    return found, forwards
