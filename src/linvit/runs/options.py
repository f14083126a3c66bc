"""The options of a class, as the parser finds them: those that it forwards by `**kwargs` and nested ones included."""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser


class Option(NamedTuple):
    """An option.

    Attributes:
        default: Its default value.
        help: What the class's documentation says of it.
    """

    default: Any
    help: str


def options_of(owner: type) -> dict[str, Option]:
    """Options by name; those of a nested dataclass as `augmentation.hflip`."""
    parser = ArgumentParser()
    parser.add_class_arguments(owner, fail_untyped=False)
    return {
        action.dest: Option(action.default, action.help or "")
        for action in parser._actions
        if action.default != argparse.SUPPRESS  # of --help, and of a nested dataclass as a whole
    }


def subclasses(base: type) -> Iterator[type]:
    """A class and all imported classes below it."""
    yield base
    children: list[type] = base.__subclasses__()
    for child in children:
        yield from subclasses(child)
