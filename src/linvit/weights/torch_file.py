"""Files of `torch.save`, the old format and the new, read without running what is in them."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linvit.errors import UserError
from linvit.weights.inert import Machine, Storage

MAGIC = 0x1950A86A20F9469CFC6C  # opens a file of torch.save before 1.6


def check_archive(path: Path) -> None:
    """Looks into a zip file's table of contents, before anything is unpacked.

    Raises:
        UserError: If it holds more bytes than the file has (`torch.save` compresses nothing), or a TorchScript program.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:
        raise broken(path, error) from error
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise UserError(f"'{path}' is a TorchScript program, which is not run. Use a file of weights")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise UserError(f"'{path}' is a zip file that unpacks to more than its size. torch.save compresses nothing")


def read(path: Path) -> Any:
    """The content of a file of `torch.save`, old format or new: plain values, containers, `StoredTensor`, `Inert`.

    Raises:
        UserError: If it is no such file, or incomplete.
    """
    try:
        return _read_zip(path) if zipfile.is_zipfile(path) else _read_stream(path)
    except UserError:
        raise
    except Exception as error:  # bytes of any kind
        raise broken(path, error) from error


def broken(path: Path, error: Exception) -> UserError:
    """What to say of a file that cannot be read."""
    return UserError(
        f"'{path}' is incomplete or not a checkpoint ({path.stat().st_size} bytes): {type(error).__name__}: "
        f"{str(error)[:200]}. Download it again, or use another file"
    )


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        (main,) = (name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1)
        folder = main.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise UserError(f"'{path}' was written on a big-endian machine; save it again on another")
        program = archive.read(main)
    numbers: dict[str, Tensor] = {}

    def numbers_of(storage: Storage) -> Tensor:
        if storage.key not in numbers:
            with zipfile.ZipFile(path) as archive:
                numbers[storage.key] = _numbers(archive.read(f"{folder}data/{storage.key}"), storage.dtype)
        return numbers[storage.key]

    return Machine(numbers_of).run(io.BytesIO(program))


def _read_stream(path: Path) -> Any:
    """The format before torch 1.6: five pickles in a row, then the numbers of each storage."""
    places: dict[str, tuple[int, int]] = {}
    numbers: dict[str, Tensor] = {}

    def numbers_of(storage: Storage) -> Tensor:
        if storage.key not in numbers:
            start, size = places[storage.key]
            with path.open("rb") as file:
                file.seek(start)
                numbers[storage.key] = _numbers(file.read(size), storage.dtype)
        return numbers[storage.key]

    machine = Machine(numbers_of)
    with path.open("rb") as file:
        if machine.run(file) != MAGIC:
            raise ValueError("it is not written by torch.save")
        machine.run(file)  # version of the format
        machine.run(file)  # sizes of C types
        content = machine.run(file)
        for key in machine.run(file):
            (count,) = struct.unpack("<q", file.read(8))
            places[key] = file.tell(), count * machine.dtypes[key].itemsize
            if file.seek(places[key][1], io.SEEK_CUR) > path.stat().st_size:
                raise EOFError("the numbers of its tensors are cut off")
    return content


def _numbers(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
