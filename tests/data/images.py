"""Makes small images, folders of them and tables of them."""

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image


def picture(seed: int = 0, width: int = 12, height: int = 10, mode: str = "RGB") -> Image.Image:
    """Reproducible noise; two of different seeds differ."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def save(image: Image.Image, path: Path, **options: object) -> Path:
    """Writes an image, its folder included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def image_folder(root: Path, splits: Iterable[str], classes: Iterable[str] = ("ant", "bee"), count: int = 3) -> Path:
    """`root/SPLIT/CLASS/N.png`, every image another one. A split "" puts the classes into `root` itself."""
    seed = 0
    for split in splits:
        for name in classes:
            for number in range(count):
                save(picture(seed), root / split / name / f"{number}.png")
                seed += 1
    return root


def png(image: Image.Image) -> bytes:
    """An image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def plain_table(path: Path, count: int = 10, **columns: list[object]) -> Path:
    """A parquet file of images as another program writes it: `image` is bytes and path, nothing says it is an image."""
    images = [{"bytes": png(picture(seed)), "path": None} for seed in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table({"image": images, **columns}), path)
    return path
