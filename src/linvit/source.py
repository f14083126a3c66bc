"""What the source of a registered name says, read without running it: `linvit list` must survive any plug-in.

A target is `package.module:Class`, as in `linvit.registry.Entry`. Its file is found along the dotted path without
importing a parent package, and parsed. What only running the code can tell is left to `linvit list --check`.
"""

import ast
import functools
import importlib.util
import re
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

_MOVES_MODULES = {"sys.path", "sys.modules", "sys.meta_path", "sys.path_hooks", "site.addsitedir", "__path__"}
_MAKES_NAMES = {"*", "__getattr__", "globals", "locals", "vars", "exec", "setattr", "sys.modules"}


def summary(target: str) -> str:
    """First line of the docstring of the class or function, or else of its module; empty if there is none."""
    module, own = _docstrings(target)
    return (own or module).partition("\n")[0]


def documentation(target: str) -> str:
    """The docstring of the module, then that of the class or function in it."""
    return "\n\n".join(text for text in _docstrings(target) if text)


def complexity(target: str) -> str:
    """What the class says of itself in `complexity = "O(N)"`; empty if it says nothing."""
    _, definition = _definition(target)
    for statement in definition.body if isinstance(definition, ast.ClassDef) else []:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id="complexity")], value=ast.Constant(value=str() as value))
                | ast.AnnAssign(target=ast.Name(id="complexity"), value=ast.Constant(value=str() as value))
            ):
                return value
    return ""


def paper(target: str) -> str:
    """First author and year, "Han et al. 2023", from the line `Paper: ...` of the module's docstring; empty if none."""
    module, _ = _docstrings(target)
    found = re.search(r"^Paper: ([^,\n]*\b\d{4})", module, re.MULTILINE)
    return found[1] if found else ""


def problem(target: str) -> str | None:
    """Why importing a target must fail, as far as that can be told without running it; None if nothing is known."""
    module, _, attribute = target.partition(":")
    if not attribute:
        return f"'{target}' names no class; an entry point reads 'package.module:Class'"
    parts = module.split(".")
    tree, paths_hold = None, True
    for name in (".".join(parts[: end + 1]) for end in range(len(parts))):  # importing runs the parent packages, too
        spec = _find(name)
        if spec is None:
            return f"there is no module '{name}'" if paths_hold else None
        try:
            tree = _parse(spec)
        except SyntaxError as error:
            return f"{name}, line {error.lineno}: SyntaxError: {error.msg}"
        if tree is None:
            continue
        paths_hold = paths_hold and not _MOVES_MODULES & _mentioned(tree)
        for statement in tree.body:
            reason = _obstacle(statement, tree, name, spec, paths_hold)
            if reason:
                return f"{name}, line {statement.lineno}: {reason}"
    return _no_class(module, attribute, tree) if tree else None


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


def _parse(spec: ModuleSpec | None) -> ast.Module | None:
    """The syntax tree of a module; None if it has no source to read. Raises SyntaxError."""
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        return None
    return _parse_file(spec.origin)


@functools.cache
def _parse_file(path: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # somebody else's invalid escape sequences
        try:
            return ast.parse(Path(path).read_bytes(), path)
        except (OSError, ValueError, RecursionError, MemoryError):
            return None


def _mentioned(code: ast.AST) -> set[str]:
    """All names that code defines, imports, assigns or reads, and `name.attribute` pairs, however deep."""
    found: set[str] = set()
    for node in ast.walk(code):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
            case ast.Name(id=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found.add(f"{name}.{attribute}")
            case ast.Global(names=names):
                found.update(names)
    return found


def _mentions(tree: ast.Module, name: str) -> list[ast.stmt]:
    return [statement for statement in tree.body if name in _mentioned(statement)]


def _obstacle(statement: ast.stmt, tree: ast.Module, name: str, spec: ModuleSpec, paths_hold: bool) -> str | None:
    """Why an unconditional statement of module `name` cannot be passed, or None."""
    wanted: list[str] = []
    match statement:
        case ast.Raise():
            return ast.unparse(statement).partition("\n")[0]
        case ast.Expr(value=ast.Call(func=func)) if ast.unparse(func) in ("sys.exit", "os._exit"):
            return ast.unparse(statement).partition("\n")[0]
        case ast.Expr(value=ast.Call(func=ast.Name(id="exit" | "quit" as own))) if len(_mentions(tree, own)) == 1:
            return ast.unparse(statement).partition("\n")[0]  # the builtin: nothing else here mentions the name
        case ast.Import(names=aliases):
            wanted = [alias.name.partition(".")[0] for alias in aliases]
        case ast.ImportFrom(level=level):
            source = _absolute(statement, name, spec)
            wanted = [source if level else source.partition(".")[0]]
    missing = [module for module in wanted if module not in sys.modules and _find(module) is None]
    return f"ModuleNotFoundError: No module named '{missing[0]}'" if missing and paths_hold else None


def _absolute(statement: ast.ImportFrom, name: str, spec: ModuleSpec) -> str:
    """The module that `from ... import` in module `name` reads; dots that lead out of the package stay."""
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    source = "." * statement.level + (statement.module or "")
    try:
        return importlib.util.resolve_name(source, package)
    except ImportError:
        return source


def _no_class(module: str, attribute: str, tree: ast.Module) -> str | None:
    """Why a module has no such class, or None if it has, or may have."""
    name = attribute.partition(".")[0]
    if _MAKES_NAMES & _mentioned(tree) or _find(f"{module}.{name}"):
        return None
    match _mentions(tree, name):
        case []:
            return f"module '{module}' defines no '{name}'"
        case [ast.Assign(targets=[ast.Name()], value=ast.Constant() as value)]:
            return f"'{name}' in module '{module}' is {ast.unparse(value)}, not a class"
    return None


def _docstrings(target: str) -> tuple[str, str]:
    """Docstrings of the module that defines a target, and of its class or function."""
    module, definition = _definition(target)
    own = definition and ast.get_docstring(definition)
    return (module and ast.get_docstring(module)) or "", own or ""


def _definition(target: str, hops: int = 9) -> tuple[ast.Module | None, ast.ClassDef | ast.FunctionDef | None]:
    """The module and the class or function behind a target, through re-exports and `partial(Class, ...)`."""
    module, _, name = target.partition(":")
    spec = _find(module)
    try:
        tree = _parse(spec)
    except SyntaxError:
        return None, None
    if spec is None or tree is None:
        return None, None
    for statement in reversed(tree.body if hops else []):
        match statement:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return tree, statement
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(args=[ast.Name(id=of), *_])) if found == name:
                return _definition(f"{module}:{of}", hops - 1)
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    if name == (alias.asname or alias.name):
                        return _definition(f"{_absolute(statement, module, spec)}:{alias.name}", hops - 1)
    return tree, None
