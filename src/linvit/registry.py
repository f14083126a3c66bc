"""Names of attention mechanisms, backbones and heads, and how a spec becomes an object.

A name comes from an entry point (`linvit.attentions`, `linvit.backbones`, `linvit.heads`) or from a decorator in the
running program. An entry point is `name = "package.module:Class"`, or `family = "package.module"` for all names that
the module assigns from `preset`. linvit's own names are entry points like anybody else's. Nothing is imported before it
is used: entry points are read from package metadata and presets from the source of their module, so listing names
imports no torch.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any, TypeVar

from linvit import source
from linvit.errors import UserError, did_you_mean

T = TypeVar("T", bound=Callable[..., Any])

Spec = str | Mapping[str, Any]
"""A name, or a mapping with `name` and options: `focused` or `{name: focused, focusing_factor: 4}`."""


def preset(constructor: Callable[..., Any], **options: Any) -> functools.partial[Any]:
    """Registers the name that it is assigned to, with other defaults of a constructor.

    An entry point names the module, and the names are read from its source: write `NAME = preset(...)` at top level.

    Args:
        constructor: A class or function, or another preset.
        options: Options and their values; a spec may change them.

    Example:
        >>> swin_tiny = linvit.preset(Swin, embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
    """
    return functools.partial(constructor, **options)


@dataclass(frozen=True)
class Entry:
    """A name, and who registers it."""

    name: str
    target: str  # "package.module:Class"
    owner: str  # "linvit", "linvit-cosine 0.2", or the module that used the decorator
    registered: Callable[..., Any] | None = None  # the object itself, when a decorator brought it

    def load(self, kind: str) -> Callable[..., Any]:
        """Imports the object; what a plug-in raises on import, `SystemExit` too, becomes a `UserError`."""
        if self.registered is not None:
            return self.registered
        module, _, attribute = self.target.partition(":")
        try:
            loaded = importlib.import_module(module)
            loaded = attrgetter(attribute)(loaded) if attribute else loaded
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plug-in may even call sys.exit
            if self.owner == "linvit":
                raise
            if self.target == self.name:
                raise UserError(
                    f"{kind} class '{self.name}' cannot be imported: {type(error).__name__}: {error}. "
                    f"Check the path 'package.module:Class', and that its package is installed"
                ) from error
            raise UserError(
                f"{kind} '{self.name}' of {self.owner} cannot be imported from '{self.target}': "
                f"{type(error).__name__}: {error}. Mend or uninstall {self.owner}, or name another {kind}."
            ) from error
        if not attribute:
            raise UserError(
                f"the entry point '{self.name}' of {self.owner} names the module '{module}', which defines no {kind}. "
                f"Write NAME = linvit.preset(CLASS, option=value) in it, or name a class: '{module}:Class'"
            )
        if not callable(loaded):
            raise UserError(
                f"{kind} '{self.name}' of {self.owner} is {loaded!r}, not a class. "
                f"Mend the entry point '{self.target}' or uninstall {self.owner}."
            )
        return loaded  # type: ignore[no-any-return]


class Registry:
    """Maps names to constructors, lazily.

    Args:
        kind: What is registered, for messages: "attention".
        group: The entry-point group in which packages announce theirs: "linvit.attentions".
        base: `package.module:Class` that everything registered must subclass, or None.
        supplied: Arguments of the constructor that attention layers supply, and not the user.
    """

    def __init__(self, kind: str, group: str, base: str | None = None, supplied: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.group = group
        self.base = base
        self.supplied = supplied
        self._registered: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator that registers a class for this process.

        Raises:
            UserError: If the name is registered already.

        Example:
            >>> @linvit.register_attention("cosine")
            ... class Cosine(linvit.Attention): ...
        """

        def decorate(constructor: T) -> T:
            built = constructor.func if isinstance(constructor, functools.partial) else constructor
            target = f"{built.__module__}:{built.__qualname__}"
            entry = Entry(name, target, f"module {built.__module__}", constructor)
            owners = [other for other in self.entries().get(name, []) if other.target != target]
            if owners:
                raise UserError(self._collision(name, [*owners, entry]))
            self._registered[name] = entry
            return constructor

        return decorate

    def entries(self) -> dict[str, list[Entry]]:
        """Returns every name with all its entries, sorted by name; nothing is imported."""
        found: dict[str, list[Entry]] = {}
        for entry in _announced(self.group):
            found.setdefault(entry.name, []).append(entry)
        for name, entry in self._registered.items():
            found[name] = [other for other in found.get(name, []) if other.target != entry.target] + [entry]
        return dict(sorted(found.items()))

    def names(self, pattern: str = "*") -> list[str]:
        """Returns names that match a wildcard pattern such as `"*linear*"`; nothing is imported."""
        return [name for name in self.entries() if fnmatchcase(name, pattern)]

    def get(self, name: str) -> Callable[..., Any]:
        """Returns the constructor of a registered name, or of a class path `package.module:Class`.

        Raises:
            UserError: If the name is unknown, has two owners, or its package is broken.
        """
        owners = [Entry(name, name, f"'{name}'")] if ":" in name else self.entries().get(name, [])
        if not owners:
            raise UserError(self._unknown(name))
        if len(owners) > 1:
            raise UserError(self._collision(name, owners))
        constructor = owners[0].load(self.kind)
        if self.base is not None:
            base = Entry(self.kind, self.base, "linvit").load(self.kind)
            if not (isinstance(constructor, type) and issubclass(constructor, base)):  # type: ignore[arg-type]
                raise UserError(
                    f"{self.kind} '{name}' of {owners[0].owner} is {constructor!r}, not a subclass of "
                    f"{self.base.replace(':', '.')}. Mend {owners[0].owner} or name another {self.kind}."
                )
        return constructor

    def create(self, spec: Spec, **context: Any) -> Any:
        """Builds what a spec describes.

        Args:
            spec: A name, or a mapping with `name` and options.
            context: Arguments that the caller (a layer, a task) supplies, such as `dim` or `img_size`.

        Raises:
            UserError: If the spec has no name or an unknown one, or an option that the constructor does not take, or if
                the constructor does not take what every attention layer supplies.
        """
        name, options = self.parse(spec)
        constructor = self.get(name)
        parameters, takes_any = _signature(constructor)
        supplied = [argument for argument in self.supplied if argument in context]
        lacking = [argument for argument in supplied if argument not in parameters]
        if lacking:
            raise UserError(
                f"{self.kind} '{name}': its constructor must take {', '.join(supplied)}; it lacks {', '.join(lacking)}"
            )
        for option in options:
            if not (takes_any or option in parameters) or option in context:
                raise UserError(self._no_option(name, option, parameters, context))
            if isinstance(parameters.get(option), bool) and not isinstance(options[option], bool):
                raise UserError(
                    f"{self.kind} '{name}': {option} must be true or false; got {options[option]!r}. "
                    f"Write {{name: {name}, {option}: {str(parameters[option]).lower()}}}"
                )
        for argument in context:
            if not (takes_any or argument in parameters):
                raise UserError(self._no_option(name, argument, parameters, {}))
        return constructor(**context, **options)

    def parse(self, spec: Spec) -> tuple[str, dict[str, Any]]:
        """Splits a spec into its name and its options."""
        if isinstance(spec, str):
            return spec, {}
        if not isinstance(spec, Mapping):
            raise UserError(
                f"{self.kind} spec {spec!r} is neither a name nor a mapping. Write {self.kind}: NAME, or "
                f"{self.kind}: {{name: NAME, option: value}}"
            )
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UserError(self._nameless(spec, options))
        return name, options

    def _unknown(self, name: str) -> str:
        by_owner: dict[str, list[str]] = {}
        for known, owners in self.entries().items():
            by_owner.setdefault(" and ".join(entry.owner for entry in owners), []).append(known)
        listed = "; ".join(f"{', '.join(names)} ({owner})" for owner, names in by_owner.items()) or "none"
        article = "an" if self.kind[0] in "aeiou" else "a"
        return (
            f"no {self.kind} is called '{name}'.{did_you_mean(name, self.entries())}\n"
            f"  known: {listed}\n"
            f"  {article} {self.kind} of your own: announce it in the entry-point group '{self.group}', "
            f"or name its class as 'package.module:Class'"
        )

    def _collision(self, name: str, owners: list[Entry]) -> str:
        claims = " and ".join(f"{entry.owner} ({entry.target})" for entry in owners)
        return (
            f"two owners claim the {self.kind} name '{name}': {claims}. Rename or uninstall one of them, "
            f"or name the class itself: '{owners[0].target}'"
        )

    def _no_option(self, name: str, option: str, parameters: Mapping[str, Any], context: Mapping[str, Any]) -> str:
        options = {key: value for key, value in parameters.items() if key not in context}
        shown = ", ".join(
            key if value is inspect.Parameter.empty else f"{key}={value}" for key, value in options.items()
        )
        return (
            f"{self.kind} '{name}' takes no option '{option}'.{did_you_mean(option, options)}\n"
            f"  options: {shown or 'none'}"
        )

    def _nameless(self, spec: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        takers = (
            name
            for name, owners in self.entries().items()
            if owners[0].owner == "linvit" and options.keys() <= parameters_of(self.get(name)).keys()
        )
        name = next(takers, "NAME")
        written = ", ".join(f"{key}: {value}" for key, value in {"name": name, **options}.items())
        return (
            f"{self.kind} spec {dict(spec)!r} has no name. Write {{{written}}}, "
            f"or on the command line --model.{self.kind}.name={name}"
        )


def parameters_of(constructor: Callable[..., Any]) -> dict[str, Any]:
    """Returns parameters of a constructor and defaults, including those that `**kwargs` forward to its parents."""
    return _signature(constructor)[0]


def takes(constructor: Callable[..., Any], option: str) -> bool:
    """Returns whether a constructor has this parameter, or `**kwargs` that no parent's signature restricts."""
    parameters, takes_any = _signature(constructor)
    return takes_any or option in parameters


def _signature(constructor: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Returns parameters with their defaults, and whether the constructor takes others too."""
    if isinstance(constructor, functools.partial):
        parameters, takes_any = _signature(constructor.func)
        return dict(list(parameters.items())[len(constructor.args) :]) | constructor.keywords, takes_any
    found: dict[str, Any] = {}
    forwards = False
    for owner in inspect.getmro(constructor) if isinstance(constructor, type) else [constructor]:
        if isinstance(owner, type) and "__init__" not in vars(owner):
            continue
        if owner is object or (owner.__module__, owner.__qualname__) == ("torch.nn.modules.module", "Module"):
            break  # whatever their signatures say, they take nothing
        forwards = False
        signature = inspect.signature(vars(owner)["__init__"] if isinstance(owner, type) else owner)
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                forwards = forwards or parameter.kind is parameter.VAR_KEYWORD
            elif parameter.name != "self":
                found.setdefault(parameter.name, parameter.default)
        if not forwards:
            break
    return found, forwards


@functools.cache
def _announced(group: str) -> tuple[Entry, ...]:
    """Reads the entry points of a group without importing them: a class each, or the presets of a module."""
    found: list[Entry] = []
    for point in entry_points(group=group):
        owner = "unknown" if point.dist is None else _owner(point.dist.name, point.dist.version)
        module, attribute = _target(point)
        presets = [] if attribute else source.presets(module)
        found += [Entry(name, f"{module}:{name}", owner) for name in presets]
        if not presets:
            found.append(Entry(point.name, f"{module}:{attribute}" if attribute else module, owner))
    return tuple(found)


def _target(point: EntryPoint) -> tuple[str, str]:
    """Splits an entry point into module and class, without spaces and `[extras]`; a malformed one stays."""
    match = point.pattern.match(point.value)
    return (match["module"], match["attr"] or "") if match else (point.value, "")


def _owner(distribution: str, version: str) -> str:
    return distribution if distribution == "linvit" else f"{distribution} {version}"


attentions = Registry(
    "attention",
    "linvit.attentions",
    base="linvit.attention.base:Attention",
    supplied=("dim", "num_heads", "grid", "key_dim"),
)
backbones = Registry("backbone", "linvit.backbones")
heads = Registry("head", "linvit.heads")
