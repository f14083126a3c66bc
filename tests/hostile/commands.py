"""Hostile configurations and plug-ins."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from linvit.cli import main
from tests.plugin.distributions import forget_packages, write_distribution
from tests.runs.test_yaml_text import BOMBS

Door = Callable[[Path, str], object]


def configurations(root: Path, mark: Path) -> Iterator[Path]:
    """Configurations that are not text, never end, or run something if they are read carelessly."""
    files: dict[str, str | bytes] = {name.replace(" ", "_"): text for name, (text, _) in BOMBS.items()}
    files |= {
        "binary": os.urandom(5000),
        "nul": b"\0" * 1000,
        "latin": "é: ü".encode("latin-1"),
        "huge": b"#" * 2**26,
        "escapes": "\x1b[2J: 3",
        "tags": f"a: !!python/object/apply:os.system ['touch {mark}']",
        "a_word": "word",
        "long_word": "word" * 10**6,
        "a_list": "[1, 2]",
        "long_key": f"{'k' * 10**6}: 1",
        "digits": f"seed_everything: {'9' * 10**5}",
        "circle": "base: circle.yaml",
    }
    for name, content in files.items():
        path = root / f"{name}.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield path
    for level in range(25):
        for side in "ab":
            bases = "" if level == 0 else f"base: [{level - 1}a.yaml, {level - 1}b.yaml]"
            (root / f"{level}{side}.yaml").write_text(bases or "seed_everything: 1", encoding="utf-8")
    yield root / "24a.yaml"
    for level in range(2000):
        (root / f"chain{level}.yaml").write_text(f"base: chain{level + 1}.yaml", encoding="utf-8")
    yield root / "chain0.yaml"
    os.mkfifo(root / "pipe.yaml")
    yield root / "pipe.yaml"
    (root / "zero.yaml").symlink_to("/dev/zero")
    yield root / "zero.yaml"


def plugins(root: Path) -> Iterator[Path]:
    """Folders of installed packages."""
    group = "[linvit.attentions]\n"
    packages = {
        "hanging": ("hanging = hanging_:Mine", {"hanging_": "import time\ntime.sleep(1000)\n"}),
        "leaving": ("hanging = leaving_:Mine", {"leaving_": "import os\nos._exit(0)\n"}),
    }
    for name, (line, modules) in packages.items():
        write_distribution(root / name, f"linvit-{name}", "1.0", f"{group}{line}\n", **modules)
        yield root / name


def _with(*arguments: str) -> Door:
    """A command where a folder of packages is installed."""

    def run(path: Path, address: str) -> object:
        sys.path.insert(0, str(path))
        importlib.invalidate_caches()
        forget_packages()
        return main(list(arguments))

    return run


CONFIG_DOORS: dict[str, Door] = {
    "linvit fit --config": lambda path, address: main(["fit", f"--config={path}"]),
    "linvit predict --config": lambda path, address: main(["predict", "--config", str(path)]),
}
PLUGIN_DOORS: dict[str, Door] = {  # linvit list, and check of a name, import plug-ins: those may do anything
    "linvit fit --help": _with("fit", "--help"),
    "linvit import-weights --help": _with("import-weights", "--help"),
    "linvit data check": _with("data", "check", "digits", "--workers", "0"),
}
