"""`linvit data check` of images of other bands or more than 8 bits: percentiles, and the options that they need."""

import argparse
import json
from typing import Any

from linvit.data.base import ImageData
from linvit.data.sources.band_values import band_values, describe
from linvit.data.sources.splits import HUB
from linvit.data.transforms.bands import Bands
from linvit.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is taken of an image."""
    parser.add_argument("--bands", metavar="[N,...]", help="bands that are used; the first is 1")
    parser.add_argument("--value_range", metavar="[LOW,HIGH]", help="the values that become 0 and 1")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a data module for these arguments; mean and standard deviation do not matter here.

    Raises:
        UserError: If they are no lists.
    """
    given: dict[str, Any] = {}
    for name in ("bands", "value_range"):
        try:
            given[name] = None if getattr(args, name) is None else json.loads(getattr(args, name))
        except ValueError as error:
            raise UserError(
                f"--{name} must be a list without spaces, such as [1,2,3]; got {getattr(args, name)}"
            ) from error
    channels = Bands.parse(**given).channels
    return {**given, "mean": [0.5] * channels, "std": [0.5] * channels}


def lines(data: ImageData, args: argparse.Namespace) -> list[str]:
    """What the values of the training images are, or of the first split that there is."""
    rows = data.splits.get("train") or next(iter(data.splits.values()))
    if data.image_column not in rows.features:
        return []
    on_hub = args.source.startswith(HUB)
    return describe(band_values(rows, data.image_column, args.max_pixels, on_hub, data.bands), data.bands)
