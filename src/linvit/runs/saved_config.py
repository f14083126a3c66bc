"""Reads the configuration that a run has saved as data, because it may come from an untrusted author."""

import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn

from linvit import callbacks, data, tasks
from linvit.data.base import ImageData
from linvit.errors import UserError
from linvit.registry import attention_kernels, attentions, backbones, heads
from linvit.registry.entries import known_class, texts
from linvit.registry.removed import without_removed
from linvit.runs import yaml_text
from linvit.runs.parser import options_of
from linvit.tasks import Task
from linvit.tasks.safe_loading import not_plain

KINDS = {registry.kind: registry for registry in (attentions, attention_kernels, backbones, heads)}
WORD = re.compile(r"[\w:-]*")  # neither a class path nor a file path
CLASS = re.compile(r"[\w.]+:[\w.]+")  # of a mechanism, kernel, backbone or head


def saved_config(path: Path, trains: bool = True) -> dict[str, Any]:
    """Reads the configuration of a run whose folder or checkpoint the user named; imports no third-party code.

    Data module and task must be linvit's, or classes that this program has imported, with plain values as options. Of
    the trainer's options, numbers, words and linvit's callbacks are kept.

    Args:
        path: The configuration.
        trains: True if the options of the trainer are used; a warning then names the removed ones.

    Raises:
        UserError: If data or model name a class that would have to be imported.
    """
    trust = f"may run code of the run's author. If you trust it, give --config {shlex.quote(path.as_posix())}"
    given, found = without_removed(yaml_text.mapping(path), f"'{path}'"), dict[str, Any]()
    for name, base, home in (("data", ImageData, data), ("model", Task, tasks)):
        if isinstance(part := given.get(name), dict) and isinstance(options := part.get("init_args"), dict):
            part = {**part, "init_args": {key: value for key, value in options.items() if key != "teacher"}}
        if part is not None and (reason := _names_code(part, base, home)):
            raise UserError(f"{reason} in '{path}' {trust} (linvit evaluate: --sets clean=FOLDER)")
        found |= {} if part is None else {name: part}
    for name in ("checkpoint", "non_finite", "trainer"):
        options = part if isinstance(part := given.get(name), dict) else {}
        found[name] = {key: value for key, value in options.items() if _is_word(value, path=key == "default_root_dir")}
        if name == "trainer":
            every = part if isinstance(part := options.get("callbacks"), list) else []
            own = [each for each in every if _names_code(each, Callback, callbacks) is None]
            left = [key for key in options if key not in found[name] and not (key == "callbacks" and own == every)]
            found[name] |= {"callbacks": own} if own else {}
            if left and trains:
                rank_zero_warn(f"left out: trainer.{', trainer.'.join(left)} in '{path}' {trust}")
    seed = {"seed_everything": seed} if _is_word(seed := given.get("seed_everything")) else {}
    return found | seed | {"config": [str(path)]}


def _is_word(value: Any, path: bool = False) -> bool:
    """Returns True if no parser takes a value for a class or a file name: a number, a word, or a list of numbers."""
    if isinstance(value, str):
        return path or (WORD.fullmatch(value) is not None and not Path(value).exists())
    return all(isinstance(each, bool | int | float | None) for each in (value if isinstance(value, list) else [value]))


def _names_code(given: Any, base: type, home: ModuleType) -> str | None:
    """Returns the part of a `class_path` with `init_args` that a parser might import; None without one."""
    name, options = (
        (given.get("class_path"), given.get("init_args") or {}) if isinstance(given, dict) else (given, None)
    )
    owner: Any = known_class(name, base, home) if isinstance(name, str) else None
    if owner is None or not isinstance(options, dict) or not given.keys() <= {"class_path", "init_args"}:
        return f"the class {name!r:.200}"
    known, parts = options_of(owner), [("", options)]
    for prefix, part in parts:
        for key, value in part.items():
            option, spec = f"{prefix}{key}", KINDS.get(key)
            registered = {entry.target for entries in spec.entries().values() for entry in entries} if spec else set()
            foreign = {text for text in texts(value if spec else None) if CLASS.fullmatch(text)} - registered
            takes_any = option in known or _is_word(value)
            if isinstance(value, dict) and option not in known:
                parts.append((f"{option}.", value))
            elif not_plain(value, text=key not in ("class_names", "pretrained")) or foreign or not takes_any:
                return f"the option {option}={value!r:.200}"
    return None
