"""Attention maps during training: pictures of a query token's map over chosen images."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import matplotlib as mpl
import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from linvit.analysis.maps import Query, query_map, rollout
from linvit.analysis.recorder import Call
from linvit.callbacks.attention.measurement import Measurement
from linvit.callbacks.common import LIGHT, Paper, add_picture, pixels, rgb
from linvit.callbacks.report import write_picture
from linvit.errors import UserError, check_number
from linvit.io.files import make_folder

FOLDER = "attention_maps"


class AttentionMaps(Measurement):
    """Draws a query token's map in each layer for fixed images: TensorBoard and RUN/attention_maps/STEP_KIND.png.

    There are two pictures per measurement, with a row per image and a column per layer. `weights` shows the token's row
    of the equivalent matrix, mean over heads (and channels). `focus` shows each patch's share in the token's output,
    which also exists for Hydra attention, whose matrices have rank 1 (`linvit.analysis.maps.query_map`). Negative
    values are drawn as 0. The last column is attention rollout, if every layer attends to all tokens.

    The attention of timm models is also drawn, except Swin's.

    Args:
        every_n_steps: Optimiser steps between two measurements.
        images: Images, spread evenly over the validation set.
        query: Query token: its position as fractions of the image's height and width, such as [0.3, 0.5]. null is
            the class token, or the centre of the image without one.
        max_tokens: Maximum number of tokens for rollout, which multiplies the matrices of all layers.
        max_share: Maximum fraction of the training time for measurements: each ends when it is used up, but not
            before one image is done, and while they have taken more, the next ones are skipped. null for no limit.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        images: int = 4,
        query: Sequence[float] | None = None,
        max_tokens: int = 1024,
        max_share: float | None = 0.01,
    ) -> None:
        super().__init__(every_n_steps, images, max_share)
        self.query = read_query(query)
        self.max_tokens = max_tokens
        self._told = False

    def measure(self, trainer: Trainer, calls: list[dict[str, Call]], until: float) -> None:
        """Draws the maps of the images, one after the other."""
        rows: list[Maps] = []
        for image, call in zip(self._pictures(trainer), calls, strict=True):
            if rows and time.monotonic() > until:
                break
            rows.append(attention_maps(image, call, self.query, self.max_tokens))
        for what, reason in rows[0].left_out.items() if not self._told else ():
            rank_zero_warn(f"{type(self).__name__}: {what} is left out: {reason}")
        self._told = True
        for kind in (kind for kind in KINDS if kind in rows[0].maps):
            picture, step = gallery(rows, kind), trainer.global_step
            if self.folder is not None:
                path = self.folder / FOLDER / f"{step:07}_{kind}.png"
                make_folder(path.parent)
                write_picture(path, picture)
            add_picture(trainer, f"attention/{kind}", picture)

    def _pictures(self, trainer: Trainer) -> list[np.ndarray]:
        """Returns the images (H, W, 3), uint8; for data without a mean, each is scaled to the range of its values."""
        images = cast("Tensor", self._samples).float().cpu()
        data: Any = getattr(trainer, "datamodule", None)
        if hasattr(data, "mean"):
            return list(pixels(images, data))
        low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
        images = rgb((images - low) / (high - low).clamp_min(1e-12))
        return list((255 * images).round().byte().movedim(1, -1).numpy())


def read_query(given: Sequence[float] | None) -> Query:
    """Returns the query of an option: null, or [row, column] as fractions of the image."""
    if given is None:
        return Query()
    if len(given) != 2:
        raise UserError(f"query has two fractions, of the height and of the width, such as [0.3, 0.5]; got {given}")
    for fraction in given:
        check_number("query: a fraction", fraction, at_least=0, at_most=1)
    return Query(given[0], given[1])


SIDE, GAP, LINE = 128, 6, 20  # pixels
KINDS = ("weights", "focus")
MOST = 12  # layers in a picture
OPACITY = 0.75


class Maps(NamedTuple):
    """Maps of the query token of one image."""

    image: np.ndarray  # (H, W, 3), uint8
    maps: dict[str, dict[str, Tensor]]  # by kind ("weights", "focus", "rollout") and layer, (h, w) each
    place: tuple[float, float] | None  # row and column of the query as fractions of the image; None: class token
    left_out: dict[str, str]  # undefined or unsupported maps by name, with the reason
    caption: str = ""  # written above the image
    beside: Mapping[str, np.ndarray] = MappingProxyType({})  # pictures, such as the mask over the image, by title


def attention_maps(image: np.ndarray, calls: Mapping[str, Call], query: Query, max_tokens: int = 1024) -> Maps:
    """Returns the maps of one image from its layers' inputs; failed maps are left out with the reason."""
    maps: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    left_out: dict[str, str] = {}
    place = (0.5 if query.row is None else query.row, 0.5 if query.column is None else query.column)
    is_class = False
    for layer, call in calls.items():
        try:
            found = query_map(call, query)
        except UserError as error:
            left_out[f"map of {layer}"] = str(error)
            continue
        except Exception as error:  # a third-party mechanism may fail in any way
            left_out[f"map of {layer}"] = f"{type(error).__name__}: {error}"
            continue
        is_class = is_class or found.is_class
        maps["weights"][layer] = found.weights.cpu()
        if found.focus is not None:
            maps["focus"][layer] = found.focus.cpu()
    tokens = max(call.grid.num_queries for call in calls.values())
    try:
        if tokens > max_tokens:
            raise UserError(f"{tokens} tokens are more than max_tokens={max_tokens}")
        maps["rollout"] = {"rollout": rollout(calls, query).cpu()}
    except Exception as error:
        left_out["rollout"] = str(error)
    return Maps(image, {kind: found for kind, found in maps.items() if found}, None if is_class else place, left_out)


def gallery(rows: Sequence[Maps], kind: str, paper: Paper = LIGHT) -> Image.Image:
    """Draws one kind of maps: a row per image, which comes first, columns of layers (`MOST`) and of rollout."""
    layers = list(rows[0].maps[kind])
    if len(layers) > MOST:
        layers = [layers[round(i * (len(layers) - 1) / (MOST - 1))] for i in range(MOST)]
    beside = list(dict.fromkeys(title for row in rows for title in row.beside))
    titles = ["image", *beside, *layers, *(["rollout"] if "rollout" in rows[0].maps else [])]
    captions = LINE if any(row.caption for row in rows) else 0  # above the images
    height = SIDE + GAP + captions
    picture = Image.new("RGB", (len(titles) * (SIDE + GAP) + GAP, len(rows) * height + LINE + GAP), paper.back)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(11)
    for column, title in enumerate(titles):
        while font.getlength(title) > SIDE and "." in title:
            title = title.partition(".")[2]
        draw.text((GAP + column * (SIDE + GAP), LINE / 2 + 2), title, paper.ink, font, anchor="lm")
    for row, one in enumerate(rows):
        drawn: list[Image.Image | None] = [marked(one.image, one.place)]
        drawn += [marked(one.beside[title], None) if title in one.beside else None for title in beside]
        found = one.maps.get(kind, {}) | one.maps.get("rollout", {})
        drawn += [over(one.image, found[name]) if name in found else None for name in (*layers, "rollout")]
        for column, tile in enumerate(drawn):
            if tile is not None:
                picture.paste(tile, (GAP + column * (SIDE + GAP), LINE + GAP + row * height + captions))
        if one.caption:
            draw.text((GAP, GAP + row * height + 1.5 * LINE), one.caption[:80], paper.ink, font, anchor="lm")
    return picture


def over(image: np.ndarray, weights: Tensor) -> Image.Image:
    """Returns a map (h, w) as colours over its image in grey, whose longer side has `SIDE` pixels."""
    clipped = torch.nan_to_num(weights.double(), 0, 0, 0).clamp_min(0)
    shares = (clipped / clipped.max().clamp_min(1e-300)).numpy()
    tones = Image.fromarray(mpl.colormaps["viridis"](shares, bytes=True)[..., :3])
    grey = _fitted(image).convert("L").convert("RGB")
    return Image.blend(grey, tones.resize(grey.size, Image.Resampling.NEAREST), OPACITY)


def marked(image: np.ndarray, place: tuple[float, float] | None) -> Image.Image:
    """Returns an image with a longer side of `SIDE` pixels and a ring around its query token (not a class token)."""
    tile = _fitted(image)
    if place is not None:
        column, row = (round(part * side) for part, side in zip(reversed(place), tile.size, strict=True))
        draw = ImageDraw.Draw(tile)
        for radius, colour in ((7, "white"), (6, "red"), (5, "red"), (4, "white")):
            draw.ellipse((column - radius, row - radius, column + radius, row + radius), outline=colour)
    return tile


def _fitted(image: np.ndarray) -> Image.Image:
    height, width = image.shape[:2]
    scale = SIDE / max(height, width)
    return Image.fromarray(image).resize((max(round(width * scale), 1), max(round(height * scale), 1)))
