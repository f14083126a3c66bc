"""Makes small GeoTIFFs of any bands."""

from pathlib import Path

import numpy as np
import rasterio
from rasterio.transform import from_origin

CRS = "EPSG:32631"
ORIGIN = from_origin(500_000, 5_400_000, 10, 10)


def values(seed: int = 0, bands: int = 4, height: int = 24, width: int = 32, dtype: str = "uint16") -> np.ndarray:
    """Noise (bands, H, W) from 0 to 9000, or what the type has."""
    high = 256 if dtype == "uint8" else 9001
    return np.random.default_rng(seed).integers(0, high, (bands, height, width)).astype(dtype)


def write(path: Path, array: np.ndarray, **options: object) -> Path:
    """A GeoTIFF of an array (bands, H, W)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {"crs": CRS, "transform": ORIGIN, "driver": "GTiff", "dtype": array.dtype, **options}
    with rasterio.open(path, "w", count=len(array), height=array.shape[1], width=array.shape[2], **given) as file:
        file.write(array)
    return path
