"""Names of attention mechanisms, kernels, backbones and heads, and the construction of objects from specs.

A name comes from an entry point (linvit's own names included) or from a decorator in the running program. Nothing is
imported before it is used, so listing names imports no torch.
"""

import functools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from linvit.errors import UserError, check_choice, did_you_mean
from linvit.registry import source
from linvit.registry.entries import Entry, announced, by_path
from linvit.registry.signatures import choices, required, signature
from linvit.registry.source import Description

T = TypeVar("T", bound=Callable[..., Any])

Spec = str | Mapping[str, Any]
"""A name, or a mapping with `name` and options: `focused` or `{name: focused, focusing_factor: 4}`."""


def preset(constructor: Callable[..., Any], **options: Any) -> functools.partial[Any]:
    """Registers a name, the variable that it is assigned to, for a constructor with other defaults.

    An entry point names the module, and the names are read from its source: write `NAME = preset(...)` at top level.

    Args:
        constructor: A class or function, or another preset.
        options: Options and their values; a spec may change them.

    Example:
        >>> swin_tiny = linvit.preset(Swin, embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
    """
    return functools.partial(constructor, **options)


class Registry:
    """Maps names to constructors, lazily."""

    def __init__(self, kind: str, group: str, base: str | None = None, supplied: tuple[str, ...] = ()) -> None:
        self.kind = kind  # for messages: "attention"
        self.group = group  # group of entry points in which packages register names: "linvit.attentions"
        self.base = base  # `package.module:Class`, the required base class
        self.supplied = supplied  # arguments that attention layers or networks supply, not the user
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
            owners = [other for other in self.owners(name) if other.target != target]
            if owners:
                raise UserError(self._collision(name, [*owners, entry]))
            self._registered[name] = entry
            return constructor

        return decorate

    def entries(self) -> dict[str, list[Entry]]:
        """Returns every name with all its entries, sorted by name; nothing is imported."""
        names = {entry.name for entry in announced(self.group)} | self._registered.keys()
        return {name: self.owners(name) for name in sorted(names)}

    def owners(self, name: str) -> list[Entry]:
        """Returns the entries of a name; nothing is imported."""
        found = [entry for entry in announced(self.group) if entry.name == name]
        own = self._registered.get(name)
        return found if own is None else [*(other for other in found if other.target != own.target), own]

    def names(self, pattern: str = "*") -> list[str]:
        """Returns names that match a wildcard pattern such as `"*linear*"`; nothing is imported."""
        return [name for name in self.entries() if fnmatchcase(name, pattern)]

    def get(self, name: str) -> Callable[..., Any]:
        """Returns the constructor of a registered name or a class path `package.module:Class`; raises a `UserError`."""
        owners = [by_path(self.kind, name, self.entries())] if ":" in name else self.owners(name)
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
                    f"{self.base.replace(':', '.')}"
                )
        return constructor

    def describe(self, name: str) -> Description:
        """Returns the docstrings of a name: linvit's files are parsed, all other names are imported, as by `get`."""
        owners = self.owners(name)
        if len(owners) == 1 and owners[0].owner == "linvit":
            return source.read(owners[0].target)
        return source.of(self.get(name))

    def create(self, spec: Spec, **context: Any) -> Any:
        """Builds the object of a spec with the arguments that the caller (a layer, a task) supplies, such as `dim`.

        Raises a `UserError` if the spec lacks an argument, or if the constructor does not accept one.
        """
        name, options = self.parse(spec)
        constructor = self.get(name)
        parameters, takes_any = signature(constructor)
        supplied = [argument for argument in self.supplied if argument in context]
        lacking = [argument for argument in supplied if argument not in parameters]
        if lacking:
            must = f"its constructor must take {', '.join(supplied)}"
            raise UserError(f"{self.kind} '{name}': {must}; it lacks {', '.join(lacking)}")
        for option, value in {**context, **options}.items():
            own = option in options
            if not (takes_any or option in parameters) or (own and option in context):
                known = [key for key in parameters if not (own and key in context)]
                raise UserError(
                    f"{self.kind} '{name}' takes no option '{option}'.{did_you_mean(option, known)}\n"
                    f"  options: {', '.join(str(parameters[key]) for key in known) or 'none'}"
                )
            if option not in parameters:
                continue
            default, allowed = parameters[option].default, choices(parameters[option])
            if isinstance(default, bool) and not isinstance(value, bool):
                raise UserError(
                    f"{self.kind} '{name}': {option} must be true or false; got {value!r}. "
                    f"Write {{name: {name}, {option}: {str(default).lower()}}}"
                )
            if allowed:
                check_choice(f"{self.kind} '{name}': {option}", value, allowed)
        if absent := required(constructor) - context.keys() - options.keys():
            write = ", ".join([f"name: {name}", *(f"{option}: VALUE" for option in sorted(absent))])
            raise UserError(f"{self.kind} '{name}' needs {', '.join(sorted(absent))}. Write {{{write}}}")
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
            raise UserError(
                f"{self.kind} spec {dict(spec)!r} has no name. Write {{name: NAME, option: value}}, or on the command "
                f"line --model.{self.kind}.name=NAME"
            )
        return name, options

    def _unknown(self, name: str) -> str:
        by_owner: dict[str, list[str]] = {}
        for known, owners in self.entries().items():
            by_owner.setdefault(" and ".join(entry.owner for entry in owners), []).append(known)
        listed = "; ".join(f"{', '.join(names)} ({owner})" for owner, names in by_owner.items()) or "none"
        return (
            f"no {self.kind} is called '{name}'.{did_you_mean(name, self.entries())}\n"
            f"  known: {listed}\n"
            f"  your own: announce it in the entry-point group '{self.group}', or name its class as "
            f"'package.module:Class'"
        )

    def _collision(self, name: str, owners: list[Entry]) -> str:
        claims = " and ".join(f"{entry.owner} ({entry.target})" for entry in owners)
        return (
            f"two owners claim the {self.kind} name '{name}': {claims}. Rename or uninstall one of them, "
            f"or name the class itself: '{owners[0].target}'"
        )


SUPPLIED = ("dim", "num_heads", "grid", "key_dim")
attentions = Registry("attention", "linvit.attentions", "linvit.attention.base:Attention", SUPPLIED)
backbones = Registry("backbone", "linvit.backbones")
attention_kernels = Registry("attention_kernel", "linvit.attention_kernels")
heads = Registry("head", "linvit.heads", "linvit.heads.base:Head", ("channels", "reductions", "num_classes"))
