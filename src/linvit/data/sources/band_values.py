"""Which values the bands of images have, and the options that follow from them."""

import argparse
import json
from collections import Counter
from typing import Any, NamedTuple

import datasets
import numpy as np

from linvit.data.sources.read import RGB, ImageReader
from linvit.data.transforms.bands import LEVELS, Bands
from linvit.data.transforms.decode import header, stored_values
from linvit.errors import UserError

IMAGES_SAMPLED = 200  # that are looked at, spread evenly over a set
PIXELS_SAMPLED = 4096  # of each
PERCENTILES = (0, 0.5, 50, 99.5, 100)


class BandValues(NamedTuple):
    """How many images of a sample have so many bands of which type, and values (bands, n) of the most frequent kind."""

    kinds: Counter[tuple[int, str]]
    values: np.ndarray


def json_list(text: str) -> list[Any]:
    """An option of a command line that is a list."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError(f"must be a list without spaces, such as [1,2,3]; got {text}")
    return found


def band_values(rows: datasets.Dataset, image: str, reader: ImageReader) -> BandValues:
    """Looks at images spread evenly over a table; those that cannot be read, or are what is asked for, are left out."""
    rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    kinds: Counter[tuple[int, str]] = Counter()
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    for number in np.linspace(0, len(rows) - 1, min(len(rows), IMAGES_SAMPLED)).astype(int).tolist():
        try:
            data = reader.load(rows[number][image])
            kind = header(data)
            if kind.width * kind.height > reader.max_pixels or (kind.plain and reader.bands == RGB):
                continue
            values = stored_values(data, kind, False, f"of row {number}")
        except (MemoryError, UserError):
            raise
        except Exception:  # a damaged file, which is listed among the bad images
            continue
        key = len(values), kind.dtype
        kinds[key] += 1
        places = np.random.default_rng(number).integers(values[0].size, size=PIXELS_SAMPLED)
        found.setdefault(key, []).append(values.reshape(len(values), -1)[:, places])
    return BandValues(kinds, np.concatenate(found[kinds.most_common(1)[0][0]], 1) if kinds else np.zeros((0, 0)))


def describe_bands(found: BandValues, bands: Bands) -> list[str]:
    """Lines with the percentiles of each band, and the options that fit them beside what is asked for already."""
    if not found.kinds:
        return []
    kinds = ", ".join(f"{count} of {dtype} ({n:,} images)" for (count, dtype), n in found.kinds.most_common())
    lines = [f"  bands     {kinds}"]
    numbers = bands.numbers or range(1, len(found.values) + 1)
    if max(numbers) > len(found.values):
        return [*lines, f"  NO BAND   {max(numbers)}"]
    lines.append(
        f"  {'band':>6}" + "".join(f"{name:>12}" for name in ("least", "0.5 %", "median", "99.5 %", "largest"))
    )
    used = [found.values[number - 1].astype(np.float64) for number in numbers]
    table = [np.percentile(band[np.isfinite(band)], PERCENTILES) if np.isfinite(band).any() else None for band in used]
    for number, row in zip(numbers, table, strict=True):
        shown = ["no number"] if row is None else [f"{value:.5g}" for value in row]
        lines.append(f"  {number:>6}" + "".join(f"{value:>12}" for value in shown))
    ranges = bands.ranges
    (_, dtype), options = found.kinds.most_common(1)[0][0], [f"--data.bands=[{','.join(map(str, numbers))}]"]
    if ranges is None and dtype == "uint8":
        ranges = ((0.0, LEVELS),)
    elif ranges is None:
        ends = [(0.0, 1.0) if row is None else (row[1], row[3] if row[3] > row[1] else row[1] + 1) for row in table]
        ranges = tuple((float(f"{low:.4g}"), float(f"{high:.4g}")) for low, high in ends)
    if dtype != "uint8" or bands.ranges is not None:
        options.append(f"--data.value_range=[{','.join(f'[{low:g},{high:g}]' for low, high in ranges)}]")
    scaled = (
        Bands(tuple(numbers), ranges if len(ranges) == len(used) else ranges[:1]).take(found.values[:, None]) / LEVELS
    )
    for name, statistic in (("mean", scaled.mean((1, 2))), ("std", scaled.std((1, 2)).clip(1e-3))):
        options.append(f"--data.{name}=[{','.join(f'{value:.3f}' for value in statistic)}]")
    return [*lines, f"  options   {' '.join(options)}"]
