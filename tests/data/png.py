"""Makes PNG files that Pillow does not write: few bits, interlaced, entries behind the pixels."""

import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def of_samples(samples: np.ndarray, bits: int, colour: int, *chunks: bytes, interlaced: bool = False) -> bytes:
    """A file whose pixels have these samples (H, W, channels), as they are stored; `chunks` stand before the pixels."""
    height, width, _ = samples.shape
    passes = [samples[y::dy, x::dx] for y, x, dy, dx in ADAM7] if interlaced else [samples]
    stored = b"".join(b"\0" + _packed(row, bits) for own in passes if own.size for row in own)
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    return SIGNATURE + b"".join(
        [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(stored)), chunk(b"IEND", b"")]
    )


def _packed(row: np.ndarray, bits: int) -> bytes:
    if bits == 16:
        return row.astype(">u2").tobytes()
    return np.packbits(np.unpackbits(row.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :].ravel()).tobytes()


def behind_pixels(data: bytes, added: bytes) -> bytes:
    """A file with one more chunk, behind the pixels."""
    return data[:-12] + added + data[-12:]


def before_pixels(data: bytes, added: bytes) -> bytes:
    """A file with one more chunk, before the pixels."""
    return data[:33] + added + data[33:]
