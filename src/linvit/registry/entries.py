"""Origin of a registered name: an entry point of an installed package, or a decorator in the running program.

An entry point is `name = "package.module:Class"`, or `family = "package.module"` for all names that the module assigns
from `linvit.preset`. Nothing is imported before it is used: presets are read from the source of their module.
"""

import functools
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoints, entry_points
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar, cast

from linvit.errors import UserError
from linvit.registry import source

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """Registered name and its owner."""

    name: str
    target: str  # "package.module:Class"
    owner: str  # "linvit", "linvit-cosine 0.2", or the module that used the decorator
    registered: Callable[..., Any] | None = None  # the object itself, if registered by a decorator

    def load(self, kind: str) -> Callable[..., Any]:
        """Imports the object; any exception of a plug-in during import, also `SystemExit`, becomes a `UserError`."""
        if self.registered is not None:
            return self.registered
        module, _, attribute = self.target.partition(":")
        whose = f"{kind} class '{self.name}'" if self.target == self.name else f"{kind} '{self.name}' of {self.owner}"
        try:
            loaded: Any = source.import_module(module)
            loaded = attrgetter(attribute)(loaded) if attribute else loaded
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plug-in may even call sys.exit
            if self.owner == "linvit":
                raise
            raise UserError(
                f"{whose} cannot be imported from '{self.target}': {type(error).__name__}: {error}"
            ) from error
        what = "function" if kind == "verb" else "class"
        if not attribute:
            way = f"Name a {what}: '{module}:NAME'"
            if kind != "verb":
                way += ", or write NAME = linvit.preset(CLASS, option=value) in it"
            raise UserError(f"{whose} names the module '{module}', which defines no {kind}. {way}")
        if not callable(loaded):
            raise UserError(f"{whose} is {loaded!r}, not a {what}")
        return loaded  # type: ignore[no-any-return]


_named: ContextVar[frozenset[str] | None] = ContextVar("class paths that may be imported", default=None)


@contextmanager
def restrict_imports_to(options: object) -> Iterator[None]:
    """Restricts imports of class paths, while a checkpoint's options are used, to registered ones and `options`."""
    token = _named.set(frozenset(texts(options)))
    try:
        yield
    finally:
        _named.reset(token)


def texts(value: object) -> Iterator[str]:
    """Yields the texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from texts(part)


def known_class(name: str, base: type[T], home: ModuleType) -> type[T] | None:
    """Returns the class of a path if it is in a module of linvit or already imported; else None."""
    dotted = name.replace(":", ".")
    last = dotted.rpartition(".")[2]
    for each in [*([getattr(home, last)] if last in home.__all__ else []), *subclasses(base)]:
        paths = (f"{each.__module__}.{each.__qualname__}", f"{home.__name__}.{last}")
        if isinstance(each, type) and issubclass(each, base) and dotted in paths and each.__name__ == last:
            return each
    return None


def subclasses(base: type) -> Iterator[type]:
    """Yields a class and all imported subclasses."""
    yield base
    children: list[type] = base.__subclasses__()
    for child in children:
        yield from subclasses(child)


def by_path(kind: str, path: str, known: Mapping[str, list[Entry]]) -> Entry:
    """Returns the entry of a class path `package.module:Class`; raises a `UserError` if it must not be imported."""
    named = _named.get()
    registered = (entry.target for entries in known.values() for entry in entries)
    if named is not None and path not in named and path not in registered:
        raise UserError(
            f"the {kind} class '{path}' is not registered, and to import it for a file or for timm would run its code. "
            f"If you trust it, register it, by an entry point of its package for all commands, or by "
            f"linvit.register_{kind}; or name it explicitly: --model.{kind}={shlex.quote(path)} beside --config, "
            f"--allow={shlex.quote(path)} of linvit predict --model, load_from_checkpoint(..., {kind}={path!r}), or "
            f"linvit.load(..., allow=[{path!r}])"
        )
    return Entry(path, path, f"'{path}'")


@functools.cache
def installed() -> EntryPoints:
    """Returns the entry points of all packages, which reads a file of each."""
    return cast("EntryPoints", entry_points())


@functools.cache
def announced(group: str) -> tuple[Entry, ...]:
    """Returns the names of a group without importing them: an entry point is a class, or a module with presets."""
    found: list[Entry] = []
    owners: dict[Distribution | None, str] = {}  # a distribution parses them at each access
    for point in installed().select(group=group):
        match = point.pattern.match(point.value)  # without spaces and `[extras]`
        module, attribute = (match["module"], match["attr"] or "") if match else (point.value, "")
        if point.dist not in owners:
            named = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
            owners[point.dist] = "linvit" if named.startswith("linvit ") else named
        owner = owners[point.dist]
        presets = [] if attribute else source.presets(module)
        found += [Entry(name, f"{module}:{name}", owner) for name in presets]
        if not presets:
            found.append(Entry(point.name, f"{module}:{attribute}" if attribute else module, owner))
    return tuple(found)
