"""Reads files of `torch.save`, in the old format and the new, without executing anything in them.

A pickle is a program: it may name any function and have it called. torch's weights-only unpickler calls only the
functions that make tensors, and stops at every other name, such as the class of a configuration beside the weights. The
file is then read again with a stand-in class under that name, which accepts any content and stores nothing.
The names in a file are never looked up or imported.
"""

import os
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import safe_globals

from linvit.errors import UserError
from linvit.io.reading import check_regular

MAX_STAND_INS = 200  # every one costs another pass over the pickle
UNKNOWN = re.compile(r"GLOBAL (\S+) was not an allowed global")
FILLED = re.compile(r"Can only (SETITEM|append|extend).* but got <class '(\S+)'>")


def load(path: Path, *, objects: bool = True) -> Any:
    """Reads a file of `torch.save`: CPU tensors, plain values and containers; with `objects`, stand-ins for the rest.

    Raises a `UserError` if it is damaged, is a program, or contains other objects.
    """
    try:
        check_regular(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be opened as weights: {error.strerror}") from error
    check_archive(path)
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    mapped = zipped and os.name != "nt"  # under Windows no process could replace the file while its tensors live
    fills: dict[str, type | None] = {}  # the name of each stand-in, and the container type as which the file fills it
    while True:
        try:
            with safe_globals([(stand_in(name, fill), name) for name, fill in fills.items()]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except UnpicklingError as error:
            text = str(error)
            unknown, filled = UNKNOWN.search(text), FILLED.search(text)
            if objects and unknown and (name := _full(unknown[1])) not in fills and len(fills) < MAX_STAND_INS:
                fills[name] = None
            elif filled and fills.get(name := _full(filled[2]), type) is None:
                fills[name] = OrderedDict if filled[1] == "SETITEM" else list
            elif not zipped and "Unsupported operand" in text:  # bytes of any kind
                raise broken(path, error) from error
            else:
                raise _refusal(path, f"it names {_full(unknown[1])}" if unknown else _reason(text)) from error
        except Exception as error:  # bytes of any kind
            raise broken(path, error) from error


def stand_in(name: str, fill: type | None) -> type:
    """Returns a class that has only its name in common with a class or function in a file."""
    module, _, own_name = name.rpartition(".")

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(cls) if fill is None else fill()

    return type(own_name, (), {"__module__": module, "__new__": new, "__setstate__": lambda *_: None})


def check_archive(path: Path) -> None:
    """Raises a `UserError` for a zip file that is damaged or a program.

    torch does not detect flipped bits. Each entry has a CRC-32 of its content, unless torch was told to write zeros.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.filename.endswith("/constants.pkl") for entry in entries):
                raise UserError(f"'{path}' is a TorchScript program, which is not run. Use a file of weights")
            damaged = archive.testzip() if any(entry.CRC for entry in entries) else None
    except UserError:
        raise
    except Exception as error:  # bytes of any kind
        raise broken(path, error) from error
    if damaged is not None:
        raise UserError(
            f"'{path}' is damaged ({path.stat().st_size} bytes): '{damaged}' in it does not match its "
            f"CRC-32. Use another file"
        )


def broken(path: Path, error: Exception) -> UserError:
    """Returns the error for a file that cannot be read."""
    return UserError(
        f"'{path}' is incomplete or not a checkpoint ({path.stat().st_size} bytes): {type(error).__name__}: "
        f"{_reason(str(error))}. Download it again, or use another file"
    )


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(
        f"'{path}' holds more than tensors and plain values in pickle protocol 2, so it is not opened: {reason}. Save "
        f"the weights alone, by torch.save(model.state_dict(), FILE)"
    )


def _full(name: str) -> str:
    """Returns the name of a class with its module, which torch and Python leave out where it is `builtins`."""
    return name if "." in name else f"builtins.{name}"


def _reason(text: str) -> str:
    """Returns the line of torch's message that states the error, without the advice before and after it."""
    line = text.partition("\n\nCheck the documentation")[0].rpartition("\n")[2]
    return line.rpartition("WeightsUnpickler error: ")[2].strip(" .")[:200]
