"""Makes TIFF files that Pillow does not write: few bits, many bands, without pixels."""

import struct
from collections.abc import Mapping, Sequence


def tiff(tags: Mapping[int, int | Sequence[int]], pixels: bytes = b"") -> bytes:
    """A file with these entries, numbers of 32 bits, whose pixels lie from byte 8 on (tag 273)."""
    count, entries, arrays = len(tags), [], b""
    at = 8 + len(pixels)
    behind = at + 2 + 12 * count + 4
    for tag, value in sorted(tags.items()):
        values = [value] if isinstance(value, int) else value
        packed = struct.pack(f"<{len(values)}I", *values)
        place = packed if len(values) == 1 else struct.pack("<I", behind + len(arrays))
        arrays += packed if len(values) > 1 else b""
        entries.append(struct.pack("<HHI", tag, 4, len(values)) + place)
    return b"II*\0" + struct.pack("<I", at) + pixels + struct.pack("<H", count) + b"".join(entries) + bytes(4) + arrays
