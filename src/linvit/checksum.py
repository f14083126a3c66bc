"""A checksum that travels in a file of `torch.save`: the SHA-256 of the archive, as the comment of the zip file.

Every reader of zip files passes over it. It is that of all bytes of the archive as torch wrote it, so a change of any
byte is noticed. Files without one, from other programs, have a CRC-32 of the content of each entry.
"""

import hashlib
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from linvit.errors import UserError

LABEL = b"linvit sha256 "
COMMENT = len(LABEL) + 64  # bytes
END = 22  # bytes of a zip file's last record, without the comment; the last two are the length of the comment
ENTRY, LAST_RECORD = b"PK\x03\x04", b"PK\x05\x06"
CHUNK = 2**20


def write(file: BinaryIO, archive: memoryview) -> None:
    """Writes an archive that has no comment, with its checksum."""
    file.write(archive[:-2])
    file.write(struct.pack("<H", COMMENT) + LABEL + hashlib.sha256(archive).hexdigest().encode())


def verify(path: Path) -> None:
    """Reads a file and compares it with its checksum, or with the CRC-32 of its entries; other formats have neither."""
    size = path.stat().st_size
    with path.open("rb") as file:
        zipped = file.read(len(ENTRY)) == ENTRY
        file.seek(max(0, size - COMMENT - END))
        tail = file.read()
        if tail[:4] == LAST_RECORD and tail[END - 2 :].startswith(struct.pack("<H", COMMENT) + LABEL):
            file.seek(0)
            digest, left = hashlib.sha256(), size - COMMENT - 2
            while chunk := file.read(min(left, CHUNK)):
                digest.update(chunk)
                left -= len(chunk)
            digest.update(bytes(2))  # the length of a comment that the archive did not have
            whole = digest.hexdigest().encode() == tail[-64:]
        elif zipped and tail[-END:].startswith(LAST_RECORD) and tail.endswith(bytes(2)):
            whole = _entries_are_whole(path)
        elif zipped:
            raise UserError(
                f"'{path}' is incomplete or not a checkpoint ({size} bytes): it is a zip file without an end"
            )
        else:
            return
    if not whole:
        raise UserError(f"'{path}' is damaged ({size} bytes): its content is not what was written, by its checksum")


def _entries_are_whole(path: Path) -> bool:
    """Whether all entries of an archive agree with their CRC-32. torch can be told to write none, which is zero."""
    try:
        with zipfile.ZipFile(path) as archive:
            return not any(entry.CRC for entry in archive.infolist()) or archive.testzip() is None
    except Exception:  # bytes of any kind
        return False
