"""Docstrings of registered names, and names that a module assigns or imports on first use.

linvit's files are parsed, not imported, so that `linvit list` imports no torch.
"""

import ast
import functools
import gc
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import PathFinder, SourceFileLoader
from inspect import cleandoc
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1]
METHOD = re.compile(rb"^    (?:@|def ).*\n(?:     .*\n|    \).*\n|\n)*", re.MULTILINE)


class Description(NamedTuple):
    """Docstrings of a class or function."""

    module: str
    """Docstring of its module, which has the formula and the paper."""
    own: str
    complexity: str = ""
    """Complexity of an attention, such as "O(N)"."""

    @property
    def summary(self) -> str:
        """First line of its docstring, or else of its module's."""
        return (self.own or self.module).partition("\n")[0]

    @property
    def documentation(self) -> str:
        """Docstring of the module, followed by its own."""
        return "\n\n".join(text for text in (self.module, self.own) if text)

    @property
    def paper(self) -> str:
        """First author and year, "Han et al. 2023", from the line `Paper: ...` of the module; empty if none."""
        found = re.search(r"^Paper: ([^,\n]*\b\d{4})", self.module, re.MULTILINE)
        return found[1] if found else ""

    @property
    def citation(self) -> str:
        """First author, year and title of that paper: 'Han et al. 2023, "FLatten Transformer: ..."'; empty if none."""
        found = re.search(r'^Papers?: ([^"\n]*\b\d{4}, "[^"]*")', self.module, re.MULTILINE)
        return " ".join(found[1].split()) if found else ""


def of(constructor: Callable[..., Any]) -> Description:
    """Returns the docstrings of an imported class, function or preset."""
    while isinstance(constructor, functools.partial):
        constructor = constructor.func
    module = _text(getattr(sys.modules.get(constructor.__module__), "__doc__", None))
    own = _text(getattr(constructor, "__doc__", None))
    facts = getattr(constructor, "facts", None)
    return Description(cleandoc(module), cleandoc(own), _text(getattr(facts, "complexity", None)))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def read(target: str) -> Description:
    """Returns the docstrings in the file of a target `linvit.module:Class`; for a preset, those of its class."""
    module, _, name = target.partition(":")
    path = PACKAGE.joinpath(*module.split(".")[1:])
    tree = _parse(str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")), methods=False)
    for statement in reversed(tree.body if tree else []):
        match statement:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return Description(_docstring(tree), _docstring(statement), _complexity(module, statement))
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(args=[ast.Name(id=of), *_])) if found == name:
                return read(f"{module}:{of}")
            case ast.ImportFrom(module=str() as origin, names=aliases) if name in [alias.name for alias in aliases]:
                return read(f"{origin}:{name}")
    return Description(_docstring(tree), "")


def presets(module: str) -> list[str]:
    """Returns the names that a module assigns from `preset(...)` or `linvit.preset(...)`; [] without readable source.

    The source is parsed, not imported: timm's registry asks for the names while `linvit.backbones` is imported, and the
    module of a plug-in imports `linvit.backbones`.
    """
    tree = _tree(module)
    found = []
    for statement in tree.body if tree else []:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="preset") | ast.Attribute(attr="preset")),
            ):
                found.append(name)
    return found


def deferred(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Returns the names imported `if TYPE_CHECKING` in a package, and a `__getattr__` that imports them on use."""
    tree = _parse(file)
    imports = [line for block in tree.body if isinstance(block, ast.If) for line in block.body] if tree else []
    homes = {alias.name: line.module for line in imports if isinstance(line, ast.ImportFrom) for alias in line.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(str(homes[name])), name)

    return get, sorted(homes)


def import_module(name: str) -> ModuleType:
    """Imports a module while Python's garbage collector, which takes a sixth of the time of an import, is paused."""
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if not gc.get_freeze_count():  # makes the new objects old ones without looking at each
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _tree(module: str) -> ast.Module | None:
    """Returns the syntax tree of a module; unlike `importlib.util.find_spec`, this imports no parent package."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # an empty name, or a module without a file, such as __main__
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        return None
    return _parse(spec.origin)


@functools.cache
def _parse(path: str, methods: bool = True) -> ast.Module | None:
    """Returns the syntax tree of a file; without methods, which takes a third of the time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences in other packages
        try:
            text = Path(path).read_bytes()
            return ast.parse(text if methods else METHOD.sub(b"    ...\n", text), path)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            return None


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | None) -> str:
    return (node and ast.get_docstring(node)) or ""


def _complexity(module: str, definition: ast.ClassDef | ast.FunctionDef) -> str:
    """Returns the complexity in `facts = Facts(complexity="O(N)")` of a class or of the first parent that has it."""
    if isinstance(definition, ast.FunctionDef):
        return ""
    for line in definition.body:
        match line:
            case ast.Assign(targets=[ast.Name(id="facts")], value=ast.Call(keywords=keywords)):
                given = {keyword.arg: keyword.value for keyword in keywords}.get("complexity")
                return str(given.value) if isinstance(given, ast.Constant) else ""
    parents = (read(f"{module}:{base.id}") for base in definition.bases if isinstance(base, ast.Name))
    return next((parent.complexity for parent in parents if parent.complexity), "")
