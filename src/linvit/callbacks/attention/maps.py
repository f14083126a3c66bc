"""Where attention looks while training: pictures of a query token's map over chosen images."""

import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from linvit.analysis.maps import Query
from linvit.analysis.recorder import Call
from linvit.callbacks.attention.measurement import Measurement
from linvit.callbacks.attention.pictures import KINDS, Maps, attention_maps, gallery
from linvit.callbacks.pixels import pixels, rgb
from linvit.callbacks.tensorboard import add_picture
from linvit.errors import UserError, check_number

FOLDER = "attention_maps"


class AttentionMaps(Measurement):
    """Draws what a query token of fixed images sees in each layer, to TensorBoard and RUN/attention_maps/STEP_KIND.png.

    There are two pictures per measurement, with a row per image and a column per layer. `weights` shows the token's row
    of the equivalent matrix, mean over heads (and channels). `focus` shows each patch's share in the token's output,
    which is how Hydra attention can be seen, whose matrices are of rank 1 (`linvit.analysis.maps.query_map`). Negative
    values are drawn as 0. The last column is attention rollout, where all layers see all tokens.

    The attention of timm models is drawn, too, except Swin's.

    Args:
        every_n_steps: Optimiser steps between two measurements.
        images: Images, spread evenly over the validation set.
        query: The token that looks: its place as fractions of the image's height and width, such as [0.3, 0.5]. null is
            the class token, or the centre of the image where there is none.
        max_tokens: With more tokens there is no rollout, which multiplies the matrices of all layers.
        max_seconds: A measurement ends after so many seconds, with the images that are done by then.
        max_share: Fraction of the training time that measurements may take: each ends when it is used up, but not
            before one image is done, and while they have taken more, the next ones are left out. null for no limit.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        images: int = 4,
        query: Sequence[float] | None = None,
        max_tokens: int = 1024,
        max_seconds: float = 10.0,
        max_share: float | None = 0.01,
    ) -> None:
        super().__init__(every_n_steps, images, max_seconds, max_share)
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
            rank_zero_warn(f"{self.name}: {what} is left out: {reason}")
        self._told = True
        for kind in (kind for kind in KINDS if kind in rows[0].maps):
            picture, step = gallery(rows, kind), trainer.global_step
            if self.folder is not None:
                path = self.folder / FOLDER / f"{step:07}_{kind}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
            add_picture(trainer, f"attention/{kind}", picture)

    def _pictures(self, trainer: Trainer) -> list[np.ndarray]:
        """The images (H, W, 3), uint8; of data without a mean, each brought to the range of its values."""
        images = cast("Tensor", self._samples).float().cpu()
        data: Any = getattr(trainer, "datamodule", None)
        if hasattr(data, "mean"):
            return list(pixels(images, data))
        low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
        images = rgb((images - low) / (high - low).clamp_min(1e-12))
        return list((255 * images).round().byte().movedim(1, -1).numpy())


def read_query(given: Sequence[float] | None) -> Query:
    """The query of an option: null, or [row, column] as fractions of the image."""
    if given is None:
        return Query()
    if len(given) != 2:
        raise UserError(f"query has two fractions, of the height and of the width, such as [0.3, 0.5]; got {given}")
    for fraction in given:
        check_number("query: a fraction", fraction, at_least=0, at_most=1)
    return Query(given[0], given[1])
