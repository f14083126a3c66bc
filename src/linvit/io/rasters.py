"""Reads with rasterio, an optional dependency, the rasters that Pillow cannot read, and georeferences of images."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from linvit.errors import UserError
from linvit.io.reading import check_regular

DRIVERS = {"TIFF": "GTiff", "PNG": "PNG", "JPEG2000": "JP2OpenJPEG"}
"""GDAL's names of the formats that are read. Its other drivers are disabled: some follow addresses in a file."""


class Georeference(NamedTuple):
    """Georeference of an image, as rasterio writes it into a GeoTIFF."""

    crs: Any  # coordinate reference system, or None
    transform: Any  # from columns and rows to coordinates of that system

    def of_window(self, top: int, left: int) -> "Georeference":
        """Returns the georeference of a part whose upper left pixel is at row `top` and column `left`."""
        return Georeference(self.crs, self.transform @ type(self.transform).translation(left, top))


def load_rasterio(what: str) -> Any:
    """Imports rasterio."""
    try:
        import rasterio
    except ImportError as error:
        raise UserError(f'{what} needs rasterio: pip install "linvit[geo]"') from error
    return rasterio


def read_values(data: bytes, kind: str, name: str, most: int, numbers: Sequence[int] | None = None) -> np.ndarray:
    """Reads the values (bands, H, W) of a file of one of the formats in `DRIVERS`, as they are stored.

    All bands are read, or those of the given numbers, from 1 on. Raises an `OSError` if they, or a block of the file,
    have more than `most` bytes, or all bands more than four times as many where a block holds, and so decodes, all.
    """
    rasterio = load_rasterio(f"'{name}', a {kind} of more than 8 bits or more than 3 bands,")
    try:
        with rasterio.MemoryFile(data) as file, file.open(driver=DRIVERS[kind]) as opened:
            bands = numbers or opened.indexes
            width = max(np.dtype(dtype).itemsize for dtype in opened.dtypes)
            together = opened.count if opened.profile.get("interleave") == "pixel" else 1
            block = max(rows * columns for rows, columns in opened.block_shapes) * together
            pixels = opened.width * opened.height
            if max(pixels * len(bands), block, pixels * together / 4) * width > most:
                raise OSError(f"its values, or a block of it with its {together} bands, have more than {most:,} bytes")
            values: np.ndarray = opened.read([*bands])
    except rasterio.errors.RasterioError as error:
        raise OSError(f"rasterio cannot read it: {error.__cause__ or error}") from error
    return values


def georeference(path: str | Path) -> Georeference | None:
    """Returns the georeference of a TIFF; None without one, or, with a warning, if rasterio is not installed."""
    if not str(path).lower().endswith((".tif", ".tiff")) or not Path(path).is_file():
        return None
    try:
        rasterio = load_rasterio("the georeference of TIFFs, where they have one,")
    except UserError as error:
        warnings.warn(f"{error}; it is lost", stacklevel=2)
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        check_regular(path)
        with rasterio.open(path, driver="GTiff") as opened:
            known = opened.crs is not None or not opened.transform.is_identity
            return Georeference(opened.crs, opened.transform) if known else None


def write_tiff(
    path: Path, values: np.ndarray, place: Georeference | None, colours: Sequence[Sequence[int]] = ()
) -> None:
    """Writes values (bands, H, W), of any type, as a compressed GeoTIFF; 8-bit classes may have colours."""
    rasterio = load_rasterio(f"'{path}'")
    count, height, width = values.shape
    size = {"height": height, "width": width, "count": count, "dtype": values.dtype}
    where = {} if place is None else place._asdict()
    with rasterio.open(path, "w", driver="GTiff", compress="deflate", **size, **where) as file:
        file.write(values)
        if len(colours):
            file.write_colormap(1, {index: tuple(colour) for index, colour in enumerate(colours)})
