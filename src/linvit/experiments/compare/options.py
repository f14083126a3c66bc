"""Options in which runs differ, and the baseline of each run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def differing(options: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the options in which configurations differ, with each configuration's value; `None` without one."""
    every = list(options)
    names = dict.fromkeys(name for one in every for name in one)
    values = {name: [one.get(name) for one in every] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def covered(name: str, keys: Iterable[str]) -> bool:
    """True if an option is one of `keys`, or a part of one, or has one as a part."""
    return any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in keys)


def outermost(names: Iterable[str]) -> list[str]:
    """Names of options without those that are a part of another one: `model.attention`, not `model.attention.name`."""
    every = list(dict.fromkeys(names))
    return [name for name in every if not any(name.startswith(f"{other}.") for other in every)]


def option_text(options: Mapping[str, Any], name: str) -> str:
    """Returns the value of an option, or its parts, such as `focused, dwc=False`; "-" if there is none."""
    parts = {key[len(name) + 1 :]: value for key, value in options.items() if key.startswith(f"{name}.")}
    own = [str(parts.pop("name"))] if "name" in parts else []
    return ", ".join([*own, *(f"{part}={value}" for part, value in parts.items())]) or (
        "-" if options.get(name) is None else str(options[name])
    )


def references(
    names: Iterable[str], options: Mapping[str, Mapping[str, Any]], baseline: str, keys: Sequence[str]
) -> dict[str, str]:
    """Returns the baseline of each variant: the one with the baseline's attention and otherwise equal options.

    Without different attentions that is the one with the baseline's model on its own data; else the baseline.
    """
    others = [name for name in names if name != baseline]
    if baseline not in options:  # a teacher
        return dict.fromkeys(others, baseline)
    keys = outermost(key for key in differing(options.values()) if covered(key, keys))
    compared = [key for key in keys if covered(key, ["model.attention"])]
    compared = compared or [key for key in keys if not key.startswith("data.")] or keys

    def values(name: str, *, matched: bool) -> str:
        return str([option_text(options.get(name, {}), key) for key in keys if (key not in compared) == matched])

    own = values(baseline, matched=False)
    like = {values(name, matched=True): name for name in options if values(name, matched=False) == own}
    like[values(baseline, matched=True)] = baseline
    found = {name: like.get(values(name, matched=True), baseline) for name in others}
    used = {reference for name, reference in found.items() if reference != name}
    return {
        name: reference if name != reference else baseline
        for name, reference in found.items()
        if name != reference or name not in used
    }
