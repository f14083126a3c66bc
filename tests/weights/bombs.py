"""Pickles that leave a file behind when they are run, one for every way in which a pickle can run something."""

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

MAGIC = 0x1950A86A20F9469CFC6C  # opens a file of torch.save before 1.6


class New:
    """Runs when it is made."""

    def __new__(cls, mark: str):
        Path(mark).touch()
        return super().__new__(cls)


class State:
    """Runs when it is given its state."""

    def __setstate__(self, mark: str) -> None:
        Path(mark).touch()


class Slots:
    """Runs when an attribute is set."""

    def __setattr__(self, name: str, mark: str) -> None:
        Path(mark).touch()


class Items:
    """Runs when items are added, in any way."""

    def __setitem__(self, key: str, mark: str) -> None:
        Path(mark).touch()

    def append(self, mark: str) -> None:
        Path(mark).touch()

    def extend(self, marks: list[str]) -> None:
        Path(marks[0]).touch()

    def add(self, mark: str) -> None:
        Path(mark).touch()


class Holder:
    """Has something that runs, reached by a dotted name."""

    @staticmethod
    def run(mark: str) -> None:
        Path(mark).touch()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


HERE = __name__
EXTENSION = 240  # a code for copyreg.add_extension(HERE, "New", ...)

# Each leaves one object on the stack.
BOMBS: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda mark: named("os", "system") + text(f"touch {mark}") + b"\x85R",
    "exec": lambda mark: named("builtins", "exec") + text(f"open({mark!r}, 'w')") + b"\x85R",
    "eval": lambda mark: named("builtins", "eval") + text(f"open({mark!r}, 'w')") + b"\x85R",
    "getattr": lambda mark: (
        named("builtins", "getattr")
        + (named("builtins", "__import__") + text("os") + b"\x85R" + text("system") + b"\x86R")
        + (text(f"touch {mark}") + b"\x85R")
    ),
    "stack global": lambda mark: text("os") + text("system") + b"\x93" + text(f"touch {mark}") + b"\x85R",
    "dotted name": lambda mark: text(HERE) + text("Holder.run") + b"\x93" + text(mark) + b"\x85R",
    "inst": lambda mark: b"(" + text(f"touch {mark}") + b"ios\nsystem\n",
    "obj": lambda mark: b"(" + named("os", "system") + text(f"touch {mark}") + b"o",
    "newobj": lambda mark: named(HERE, "New") + text(mark) + b"\x85\x81",
    "newobj_ex": lambda mark: named(HERE, "New") + text(mark) + b"\x85}\x92",
    "setstate": lambda mark: named(HERE, "State") + b")\x81" + text(mark) + b"b",
    "slots": lambda mark: named(HERE, "Slots") + b")\x81N}" + text("x") + text(mark) + b"s\x86b",
    "setitem": lambda mark: named(HERE, "Items") + b")\x81" + text("x") + text(mark) + b"s",
    "setitems": lambda mark: named(HERE, "Items") + b")\x81(" + text("x") + text(mark) + b"u",
    "append": lambda mark: named(HERE, "Items") + b")\x81" + text(mark) + b"a",
    "appends": lambda mark: named(HERE, "Items") + b")\x81(" + text(mark) + b"e",
    "additems": lambda mark: named(HERE, "Items") + b")\x81(" + text(mark) + b"\x90",
    "extension": lambda mark: b"\x82" + bytes([EXTENSION]) + text(mark) + b"\x85R",
    "partial": lambda mark: (
        named("functools", "partial") + named("os", "system") + text(f"touch {mark}") + b"\x86R" + b")R"
    ),
}

# Those that are replaced by a stand-in. torch's unpickler refuses the rest: the module os, whatever else is called than
# a class or function by its name, and what no pickle of protocol 2 has.
REPLACED = {"exec", "eval", "newobj", "setstate", "slots", "setitem", "setitems", "append", "appends"}


def pickled(bomb: bytes) -> bytes:
    """`{"model": {}, "config": BOMB}`."""
    return b"\x80\x04}(" + text("model") + b"}" + text("config") + bomb + b"u."


def as_zip(path: Path, payload: bytes) -> None:
    """The format of torch.save."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, payload if name.endswith("data.pkl") else content)


def as_stream(path: Path, payload: bytes) -> None:
    """The format of torch.save before 1.6."""
    sizes = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(part, protocol=2) for part in (MAGIC, 1001, sizes))
    path.write_bytes(head + payload + pickle.dumps([], protocol=2))


def as_pickle(path: Path, payload: bytes) -> None:
    """A pickle and nothing else."""
    path.write_bytes(payload)


FORMATS = {"zip": as_zip, "stream": as_stream, "pickle": as_pickle}
