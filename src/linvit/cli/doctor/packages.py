"""Which packages are installed, beside the versions that linvit declares to need."""

import importlib.metadata
import re
from typing import NamedTuple

from linvit.cli.doctor.problem import Problem

REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?[^;]*(?:;.*extra == ['\"]([^'\"]+)['\"])?")


class Requirement(NamedTuple):
    """A package that linvit needs.

    Attributes:
        name: Of the distribution.
        least: The lowest version, or an empty string.
        extra: The optional group that needs it, or an empty string.
    """

    name: str
    least: str
    extra: str

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" if self.least else self.name


def requirements() -> list[Requirement]:
    """What linvit's own metadata declares; empty if linvit is not installed."""
    try:
        declared = importlib.metadata.requires("linvit") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    matches = [REQUIREMENT.match(line) for line in declared]
    return [Requirement(*(group or "" for group in match.groups())) for match in matches if match]


def installed(name: str) -> str | None:
    """The version of a distribution, or None if there is none or its metadata cannot be read."""
    try:
        return importlib.metadata.version(name) or None
    except Exception:  # files of any content
        return None


def examine(needed: list[Requirement]) -> list[Problem]:
    """What is missing or too old."""
    if not needed:
        return [Problem("linvit itself is not installed, so its plug-ins and names are unknown", "pip install linvit")]
    problems = []
    for requirement in needed:
        version = installed(requirement.name)
        way = f"pip install '{requirement}'"
        if version is None:
            problems.append(Problem(f"{requirement.name} is not installed", way))
        elif _numbers(version) < _numbers(requirement.least):
            problems.append(Problem(f"{requirement.name} {version} is older than linvit needs ({requirement})", way))
    return problems


def _numbers(version: str) -> list[int]:
    """2.11.0+cu132 as [2, 11]: what comes before a local part, without zeros at the end."""
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
