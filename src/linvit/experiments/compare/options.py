"""In which options configurations differ."""

from collections.abc import Iterable, Mapping
from typing import Any


def differing(options: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The options in which configurations differ, with the value of each configuration; `None` where it has none."""
    every = list(options)
    names = dict.fromkeys(name for one in every for name in one)
    values = {name: [one.get(name) for one in every] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def covered(name: str, keys: Iterable[str]) -> bool:
    """Whether an option is one of `keys`, or a part of one, or has one as a part."""
    return any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in keys)


def outermost(names: Iterable[str]) -> list[str]:
    """Names of options without those that are a part of another one: `model.attention`, not `model.attention.name`."""
    every = list(dict.fromkeys(names))
    return [name for name in every if not any(name.startswith(f"{other}.") for other in every)]


def option_text(options: Mapping[str, Any], name: str) -> str:
    """The value of an option, or its parts, such as `focused, dwc=False`; "-" if there is none."""
    parts = {key[len(name) + 1 :]: value for key, value in options.items() if key.startswith(f"{name}.")}
    own = [str(parts.pop("name"))] if "name" in parts else []
    return ", ".join([*own, *(f"{part}={value}" for part, value in parts.items())]) or (
        "-" if options.get(name) is None else str(options[name])
    )
