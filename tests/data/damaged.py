"""A set of images with everything that goes wrong with images, and everything odd that is right."""

import io
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.images import save

SIDE = 48


def damaged(root: Path, good: int = 20) -> dict[str, str | None]:
    """Fills `root/train/CLASS/` and `root/val/CLASS/`.

    Args:
        root: An empty folder.
        good: Ordinary JPEG files of each class in train.

    Returns:
        What `linvit data check` must find: the path relative to `root` to a part of the reason, or None for files that
        only look odd and are good images.
    """
    found: dict[str, str | None] = {}
    for label, name in enumerate(("ant", "bee")):
        for number in range(good):
            path = f"train/{name}/{number}.jpg"
            save(photo(1000 * label + number), root / path, quality=90)
            found[path] = None
        path = f"val/{name}/0.jpg"
        save(photo(1000 * label + 500), root / path, quality=90)
        found[path] = None
    ant, bee = root / "train" / "ant", root / "train" / "bee"
    jpeg = (ant / "0.jpg").read_bytes()
    png = encoded(photo(50), "PNG")
    bad = {
        "empty.jpg": (b"", "an empty file"),
        "text.jpg": (b"<html>404 Not Found</html>", "not an image"),
        "half.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "no_end.jpg": (jpeg[:-2], "truncated"),
        "header.jpg": (jpeg[:200], ""),
        "zeros.jpg": (jpeg[: len(jpeg) // 2] + bytes(len(jpeg) // 2), ""),
        "half.png": (png[: len(png) // 2], ""),
        "flipped.png": (png[:100] + bytes([png[100] ^ 0xFF]) + png[101:], ""),
        "bomb.png": (bomb(20_000, 10_000), "pixels"),
        "16_bit.png": (encoded(Image.fromarray(np.full((SIDE, SIDE), 9000, np.uint16)), "PNG"), "1 band of uint16"),
    }
    for name, (data, reason) in bad.items():
        (ant / name).write_bytes(data)
        found[f"train/ant/{name}"] = reason
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    save(photo(60).convert("CMYK"), bee / "cmyk.jpg")
    save(photo(61), bee / "rotated.jpg", exif=exif)
    save(photo(62).convert("P"), bee / "palette.png")
    save(photo(63).convert("RGBA"), bee / "alpha.png")
    save(photo(64).convert("L"), bee / "grey.jpg")
    save(photo(65), bee / "progressive.jpg", progressive=True)
    save(photo(66).convert("P"), bee / "animated.gif", save_all=True, append_images=[photo(67).convert("P")])
    (bee / "png_inside.jpg").write_bytes(png)
    odd = "cmyk.jpg rotated.jpg palette.png alpha.png grey.jpg progressive.jpg animated.gif png_inside.jpg"
    found |= {f"train/bee/{name}": None for name in odd.split()}
    (bee / "folder.jpg").mkdir()  # is no image
    (root / "val" / "bee" / "copy.jpg").write_bytes((bee / "1.jpg").read_bytes())
    return found | {"val/bee/copy.jpg": None}


def photo(seed: int) -> Image.Image:
    """A smooth random picture, which JPEG keeps well."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((SIDE, SIDE + 8), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A small PNG file of a large white image."""
    rows = zlib.compressobj(1)
    line = b"\0" + b"\xff" * ((width + 7) // 8)
    data = b"".join(rows.compress(line) for _ in range(height)) + rows.flush()

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)

    header = width.to_bytes(4) + height.to_bytes(4) + bytes([1, 0, 0, 0, 0])  # 1 bit, grey
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
