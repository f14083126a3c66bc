"""The attention of one or several models on the same images: statistics of each layer, maps, and the predictions."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from linvit.analysis.channel_matrix import CHANNELS
from linvit.analysis.layer_statistics import STATISTICS, layer_statistics, per_head
from linvit.analysis.maps import Query
from linvit.analysis.observe import observe
from linvit.analysis.recorder import Call
from linvit.callbacks.attention.heat_map import DARK, LIGHT, Paper, heat_map
from linvit.callbacks.attention.pictures import KINDS, Maps, attention_maps, gallery
from linvit.callbacks.dense.colours import overlay, palette
from linvit.experiments.page import Either
from linvit.plain_text import CsvWriter, printable


class Subject(NamedTuple):
    """A model that is analysed.

    Attributes:
        name: Of the model, as tables have it.
        network: Images (1, 3, H, W) in.
        predict: What it predicts for a batch, as `Task.predict_batch`; None for a model without predictions.
        class_names: Of the classes, if they are known.
        about: What is said of it, by title.
    """

    name: str
    network: nn.Module
    predict: Callable[[dict[str, Any]], dict[str, Any]] | None
    class_names: Sequence[str] | None
    about: dict[str, str]


class Photo(NamedTuple):
    """An image.

    Attributes:
        name: Of the file, or its place in the set.
        batch: A batch of this image alone, as the data module finishes it.
        pixels: (H, W, 3), uint8, as the model sees it.
        truth: The name of its class, or "" if it is not known or not one class.
    """

    name: str
    batch: dict[str, Any]
    pixels: np.ndarray
    truth: str = ""


class Found(NamedTuple):
    """What was found of a model.

    Attributes:
        subject: The model.
        rows: Layer, part, head, and the numbers in the order of `STATISTICS`.
        tokens: Queries of each layer.
        columns: Of each layer's matrix: its keys, or the channels of a head that its mechanism mixes.
        maps: Of each image.
        predictions: Of each image, in words.
        left_out: What could not be measured or drawn, with the reason.
    """

    subject: Subject
    rows: list[tuple[str, str, int, list[float]]]
    tokens: dict[str, int]
    columns: dict[str, int]
    maps: list[Maps]
    predictions: list[str]
    left_out: dict[str, str]

    def layers(self, part: str = "") -> dict[str, list[float]]:
        """The numbers of each layer, means over its heads."""
        heads: dict[str, list[list[float]]] = {}
        for layer, own, _, values in self.rows:
            if own == part:
                heads.setdefault(layer, []).append(values)
        return {layer: np.mean(values, 0).tolist() for layer, values in heads.items()}


@torch.no_grad()
def analyze(
    subject: Subject, photos: Sequence[Photo], query: Query, max_tokens: int = 1024, max_seconds: float = 120.0
) -> Found:
    """Measures and draws a model's attention on images.

    Args:
        subject: The model.
        photos: The images.
        query: The token that looks.
        max_tokens: No matrix is formed of more tokens; see `attention_statistics` and `rollout`.
        max_seconds: The statistics end after so many seconds; the layers that are left are named.

    Raises:
        UserError: If the model has no attention that can be measured.
    """
    calls = [observe(subject.network, _one(photo.batch["image"])) for photo in photos]
    rows, left_out = [], {}
    until = time.monotonic() + max_seconds
    for layer in calls[0]:
        if time.monotonic() > until:
            left_out[layer] = f"the statistics of the layers before it took {max_seconds:g} s; see --max_seconds"
            continue
        try:
            found = layer_statistics([of_image[layer] for of_image in calls], channel=0, max_tokens=max_tokens)
        except Exception as error:  # a third party's mechanism may fail in any way
            left_out[layer] = f"{type(error).__name__}: {error}"
            continue
        if not found.keys() & {"", CHANNELS}:
            left_out[layer] = f"it has more than {max_tokens} tokens and no thin factors; see --max_tokens"
        rows += [
            (layer, part, head, values)
            for part, numbers in found.items()
            for head, values in enumerate(per_head(numbers))
        ]
    tokens = {layer: call.grid.num_queries for layer, call in calls[0].items()}
    columns = {layer: call.grid.num_keys for layer, call in calls[0].items()}
    columns |= {layer: calls[0][layer].mechanism.head_dim for layer, part, *_ in rows if part == CHANNELS}
    maps, predictions = [], []
    for photo, of_image in zip(photos, calls, strict=True):
        words, mask = _prediction(subject, photo)
        predictions.append(words)
        caption = words + f" (true: {photo.truth})" * bool(words and photo.truth)
        maps.append(_maps(photo, of_image, query, max_tokens)._replace(caption=caption or photo.name, beside=mask))
    return Found(subject, rows, tokens, columns, maps, predictions, left_out | maps[0].left_out)


def _maps(photo: Photo, calls: dict[str, Call], query: Query, max_tokens: int) -> Maps:
    return attention_maps(photo.pixels, calls, query, max_tokens)


def _one(images: Tensor | list[Tensor]) -> Tensor:
    """The image of a batch of one, (1, 3, H, W)."""
    return images[0][None]


def _prediction(subject: Subject, photo: Photo) -> tuple[str, np.ndarray | None]:
    """What a model predicts of an image, in words, and the image with the predicted mask over it."""
    if subject.predict is None:
        return "", None
    predicted = subject.predict(photo.batch)

    def named(number: int) -> str:
        return printable(subject.class_names[number], lines=False) if subject.class_names else f"class {number}"

    if "probability" in predicted:
        return f"{named(int(predicted['class'][0]))}, {float(predicted['probability'][0]):.1%}", None
    if "classes" not in predicted:
        return "", None
    mask = predicted["classes"][0].cpu().numpy()
    numbers, counts = np.unique(mask, return_counts=True)
    most = sorted(zip(counts.tolist(), numbers.tolist(), strict=True), reverse=True)[:3]
    words = ", ".join(f"{named(number)}: {count / mask.size:.0%}" for count, number in most)
    pixels = np.asarray(Image.fromarray(photo.pixels).resize(mask.shape[::-1]))
    return words, overlay(pixels, mask, palette(max(int(numbers.max()) + 1, len(subject.class_names or ()))))


def write_files(found: Sequence[Found], photos: Sequence[Photo], folder: Path) -> dict[str, list[tuple[Either, str]]]:
    """Writes statistics.csv, predictions.csv and the pictures; returns the pictures of each model with their kinds."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "statistics.csv").open("w", encoding="utf-8", newline="") as file:
        writer = CsvWriter(file)
        writer.writerow(["model", "layer", "part", "head", *STATISTICS])
        writer.writerows([one.subject.name, *row[:3], *row[3]] for one in found for row in one.rows)
    with (folder / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = CsvWriter(file)
        writer.writerows(prediction_table(found, photos))
    pictures: dict[str, list[tuple[Either, str]]] = {}
    for number, one in enumerate(found):
        for kind in (kind for kind in KINDS if kind in one.maps[0].maps):
            path = folder / f"maps_{number}_{kind}.png"
            gallery(one.maps, kind).save(path)
            pictures.setdefault(one.subject.name, []).append(((path, gallery(one.maps, kind, DARK)), kind))
    return pictures


def prediction_table(found: Sequence[Found], photos: Sequence[Photo]) -> list[list[str]]:
    """The titles, and a row per image: its class, if one is known, and what each model predicts."""
    labelled = any(photo.truth for photo in photos)
    table = [["image", *["true class"] * labelled, *(one.subject.name for one in found)]]
    for photo, *words in zip(photos, *(one.predictions for one in found), strict=True):
        table.append([photo.name, *[photo.truth] * labelled, *words])
    return table


def rank_picture(found: Sequence[Found], name: str, paper: Paper = LIGHT) -> Image.Image | None:
    """A heat map of one of the `STATISTICS`: layers by models and their parts; None if nothing was measured."""
    columns = {
        f"{one.subject.name}\n{part or 'whole matrix'}": one.layers(part)
        for one in found
        for part in dict.fromkeys(part for _, part, _, _ in one.rows)
    }
    layers = list(dict.fromkeys(layer for column in columns.values() for layer in column))
    if not layers:
        return None
    index = STATISTICS.index(name)
    values = np.array(
        [[column[layer][index] if layer in column else np.nan for column in columns.values()] for layer in layers]
    )
    return heat_map(values, layers, list(columns), f"{name.replace('_', ' ')} of each layer", paper=paper)
