"""Signatures of the constructors of mechanisms, backbones and heads, to reject wrong options before the call."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from linvit.errors import check_choice


def equal_options(given: Any, other: Any) -> bool:
    """Returns True if two options are equal in any notation: tuple and list, path and its name."""
    return json.dumps(given, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


def parameters_of(constructor: Callable[..., Any]) -> dict[str, Any]:
    """Returns parameters of a constructor and defaults, including those that `**kwargs` forward to its parents."""
    return {name: parameter.default for name, parameter in signature(constructor)[0].items()}


def takes(constructor: Callable[..., Any], option: str) -> bool:
    """Returns True if a constructor has this parameter, or `**kwargs` that no parent's signature restricts."""
    parameters, takes_any = signature(constructor)
    return takes_any or option in parameters


def choices(parameter: inspect.Parameter) -> tuple[str, ...]:
    """Returns the words that a parameter's annotation allows, `Literal["mean", "sum"]`; () for other annotations."""
    found = get_args(parameter.annotation) if get_origin(parameter.annotation) is Literal else ()
    return found if all(isinstance(choice, str) for choice in found) else ()


def check_choices(owner: type, given: Mapping[str, Any]) -> None:
    """Raises a `UserError` for options with a word that the annotations of a constructor (`Literal`) do not allow."""
    for name, parameter in signature(owner)[0].items():
        if name in given and (allowed := choices(parameter)):
            check_choice(name, given[name], allowed)


def signature(constructor: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Returns parameters by name, and True if the constructor also accepts others."""
    if isinstance(constructor, functools.partial):
        parameters, takes_any = signature(constructor.func)
        parameters = dict(list(parameters.items())[len(constructor.args) :])
        for name, value in constructor.keywords.items():
            parameter = parameters.get(name) or inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            parameters[name] = parameter.replace(default=value)
        return parameters, takes_any
    found: dict[str, inspect.Parameter] = {}
    forwards = False
    for owner in inspect.getmro(constructor) if isinstance(constructor, type) else [constructor]:
        if isinstance(owner, type) and "__init__" not in vars(owner):
            continue
        if owner is object or (owner.__module__, owner.__qualname__) == ("torch.nn.modules.module", "Module"):
            break  # their signatures do not show what they accept
        forwards = False
        own = inspect.signature(vars(owner)["__init__"] if isinstance(owner, type) else owner)
        for parameter in own.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                forwards = forwards or parameter.kind is parameter.VAR_KEYWORD
            elif parameter.name != "self":
                found.setdefault(parameter.name, parameter)
        if not forwards:
            break
    return found, forwards


def required(constructor: Callable[..., Any]) -> set[str]:
    """Returns the names of the parameters without a default; those of base classes may be given by the class."""
    own = inspect.signature(constructor).parameters.values()
    return {
        one.name for one in own if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


def descriptions(constructor: Callable[..., Any]) -> dict[str, str]:
    """Returns the descriptions of a constructor's arguments from docstrings: of its class, then of the parents."""
    while isinstance(constructor, functools.partial):
        constructor = constructor.func
    found: dict[str, str] = {}
    for owner in inspect.getmro(constructor) if isinstance(constructor, type) else [constructor]:
        for section in re.findall(r"^Args.*:\n((?:    .*\n?)+)", inspect.cleandoc(owner.__doc__ or ""), re.MULTILINE):
            for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n     .*)*)", section, re.MULTILINE):
                found = {**dict.fromkeys(names.split(", "), " ".join(text.split())), **found}
    return found
