"""What the source of a registered name says, read without importing it: `linvit list` must survive any plug-in.

A target is `package.module:Class`. Its file is found along the dotted path, and parsed.
"""

import ast
import functools
import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any


def summary(target: str) -> str:
    """First line of the docstring of the class or function, or else of its module; empty if there is none."""
    module, own = _docstrings(target)
    return (own or module).partition("\n")[0]


def documentation(target: str) -> str:
    """The docstring of the module, then that of the class or function in it."""
    return "\n\n".join(text for text in _docstrings(target) if text)


def complexity(target: str) -> str:
    """The complexity in `facts = Facts(complexity="O(N)")` of the class or its parents; empty if none says it."""
    _, definition = _definition(target)
    if not isinstance(definition, ast.ClassDef):
        return ""
    for statement in definition.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="facts")], value=ast.Call(keywords=keywords)):
                given = {keyword.arg: keyword.value for keyword in keywords}.get("complexity")
                return str(given.value) if isinstance(given, ast.Constant) else ""
            case ast.Assign(
                targets=[ast.Name(id="complexity")], value=ast.Constant(value=str() as value)
            ):  # linvit 0.2
                return value
    module = target.partition(":")[0]
    return next(
        filter(None, (complexity(f"{module}:{base.id}") for base in definition.bases if isinstance(base, ast.Name))), ""
    )


def paper(target: str) -> str:
    """First author and year, "Han et al. 2023", from the line `Paper: ...` of the module's docstring; empty if none."""
    module, _ = _docstrings(target)
    found = re.search(r"^Paper: ([^,\n]*\b\d{4})", module, re.MULTILINE)
    return found[1] if found else ""


def citation(target: str) -> str:
    """First author, year and title of that paper: 'Han et al. 2023, "FLatten Transformer: ..."'; empty if none."""
    module, _ = _docstrings(target)
    found = re.search(r'^Papers?: ([^"\n]*\b\d{4}, "[^"]*")', module, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def presets(module: str) -> list[str]:
    """Names that a module assigns from `preset(...)` or `linvit.preset(...)`; none if its source cannot be read."""
    tree = _tree(_find(module))
    found = []
    for statement in tree.body if tree else []:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="preset") | ast.Attribute(attr="preset")),
            ):
                found.append(name)
    return found


def missing_package(target: str) -> str:
    """The top-level package or module of a target if it is not installed; empty if it is."""
    package = target.partition(":")[0].partition(".")[0]
    return "" if _find(package) else package


def deferred(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` of a package that imports on first use what is imported `if TYPE_CHECKING` there, and the names."""
    tree = _parse(file)
    imports = [line for block in tree.body if isinstance(block, ast.If) for line in block.body] if tree else []
    homes = {alias.name: line.module for line in imports if isinstance(line, ast.ImportFrom) for alias in line.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(str(homes[name])), name)

    return get, sorted(homes)


def _find(name: str) -> ModuleSpec | None:
    """Where a module is. Unlike `importlib.util.find_spec`, this imports no parent package."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # an empty name, or a module such as __main__ that came from nowhere
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    return spec


def _tree(spec: ModuleSpec | None) -> ast.Module | None:
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        return None
    return _parse(spec.origin)


@functools.cache
def _parse(path: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # somebody else's invalid escape sequences
        try:
            return ast.parse(Path(path).read_bytes(), path)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            return None


def _docstrings(target: str) -> tuple[str, str]:
    module, definition = _definition(target)
    own = definition and ast.get_docstring(definition)
    return (module and ast.get_docstring(module)) or "", own or ""


def _definition(target: str, hops: int = 9) -> tuple[ast.Module | None, ast.ClassDef | ast.FunctionDef | None]:
    """The module and the class or function behind a target, through re-exports and `partial(Class, ...)`."""
    module, _, name = target.partition(":")
    spec = _find(module)
    tree = _tree(spec)
    for statement in reversed(tree.body if tree and hops else []):
        match statement:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return tree, statement
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(args=[ast.Name(id=of), *_])) if found == name:
                return _definition(f"{module}:{of}", hops - 1)
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    if name == (alias.asname or alias.name):
                        inside = spec and spec.submodule_search_locations is not None  # of a package's __init__
                        parents = (module if inside else module.rpartition(".")[0]).split(".")
                        package = parents[: len(parents) + 1 - statement.level] if statement.level else []
                        source = ".".join([*package, *filter(None, [statement.module])])
                        return _definition(f"{source}:{alias.name}", hops - 1)
    return tree, None
