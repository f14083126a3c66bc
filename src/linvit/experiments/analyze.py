"""The attention of one or several models on the same images: statistics of each layer, maps, predictions, a page."""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from PIL import Image
from torch import nn

from linvit.analysis.attention_matrix import CHANNELS
from linvit.analysis.attention_statistics import STATISTICS, layer_statistics, per_head
from linvit.analysis.maps import Query
from linvit.analysis.recorder import observe
from linvit.callbacks.attention.maps import KINDS, Maps, attention_maps, gallery
from linvit.callbacks.common import DARK, LIGHT, Paper, pixels
from linvit.callbacks.dense import legend, overlay
from linvit.callbacks.report import write_picture, write_table
from linvit.data.base import ImageData
from linvit.data.sources.images import collate
from linvit.experiments.page import Page
from linvit.experiments.plots import heat_map, svg
from linvit.io.files import write_text
from linvit.io.plain_text import printable
from linvit.tasks.base import Description

EXPLAINED = {
    "weights": "The query token's row of the equivalent matrix, mean over heads and channels.",
    "focus": "Each patch's share in the query token's output, which also exists for Hydra attention.",
}
TABLE = (
    "Rank: singular values above max(N, M) times the float64 epsilon of the largest. Effective rank: exp of the "
    "entropy of the singular values (Roy & Vetterli 2007). Entropy: of the rows' magnitudes over log M, so that 1 is "
    "uniform attention. Top share: of the five largest weights. Attention distance: mean distance of the keys from the "
    "query's patch, in patches. Negative share: of the magnitudes. All are means over heads and "
    "images; where matrices differ per channel, of channel 0; of windows, of the first one. The part 'channels' is not "
    "a matrix over tokens: the mechanism (xca) mixes the channels of a head, and these are the numbers of that matrix."
)
COLUMNS = {"rank": ".1f", "effective_rank": ".1f", "stable_rank": ".2f", "spectral_norm": ".3g", "entropy": ".3f"}
COLUMNS |= {"top_share": ".3f", "attention_distance": ".2f", "negative_share": ".3f"}
"""Statistics of the table, and their digits."""
MOST_TOKENS = 1024  # limit for forming a matrix; thin factors have no limit
HEAT_MAPS = ("rank", "effective_rank")


class AnalysedModel(NamedTuple):
    """A model that is analysed."""

    name: str
    network: nn.Module  # images (1, 3, H, W) in
    describe: Callable[[dict[str, Any]], Description]  # a batch of one image, as `Task.describe` does
    class_names: Sequence[str]  # or numbers
    about: dict[str, str]  # descriptions, by title
    colours: Any = None  # of the classes (K, 3), uint8, if it predicts masks


class Photo(NamedTuple):
    """An image."""

    name: str  # of the file, or its place in the set
    batch: dict[str, Any]  # of this image alone, as the data module finishes it
    pixels: np.ndarray  # (H, W, 3), uint8, as the model sees it


class Analysis(NamedTuple):
    """Results of the analysis of a model."""

    subject: AnalysedModel
    rows: list[tuple[str, str, int, list[float]]]  # layer, part, head, and the numbers in the order of `STATISTICS`
    tokens: dict[str, int]  # queries of each layer
    columns: dict[str, int]  # of each layer's matrix: its keys, or the channels of a head that its mechanism mixes
    maps: list[Maps]  # of each image
    described: list[Description]  # each image
    left_out: dict[str, str]  # what could not be measured or drawn, and why
    drawn: Sequence[int] = ()  # numbers of the classes in the masks that are drawn

    @property
    def parts(self) -> list[str]:
        """Measured parts: "", the whole matrix, and parts of it."""
        return list(dict.fromkeys(part for _, part, _, _ in self.rows))

    def layers(self, part: str = "") -> dict[str, list[float]]:
        """Returns the numbers of each layer, means over its heads."""
        heads: dict[str, list[list[float]]] = {}
        for layer, own, _, values in self.rows:
            if own == part:
                heads.setdefault(layer, []).append(values)
        return {layer: np.mean(values, 0).tolist() for layer, values in heads.items()}


def read_photos(data: ImageData, count: int, device: torch.device, *, spread: bool = True) -> list[Photo]:
    """Returns images spread evenly over the validation set, or else the first ones of the folder that is predicted."""
    data.setup("validate" if spread else "predict")
    samples: Any = data.val_set if spread else data.predict_set
    if hasattr(samples, "__len__"):
        count = min(count, len(samples))
        samples = [samples[i * len(samples) // count if spread else i] for i in range(count)]
    photos = []
    for i, sample in enumerate(islice(samples, count)):
        batch = collate([sample], data.list_keys)
        batch["image"] = move_data_to_device(batch["image"], device)
        data.finish(batch)
        name = str(batch["id"][0]) if "id" in batch else f"image {i}"
        photos.append(Photo(name, batch, pixels(batch["image"][0], data)))
    return photos


@torch.no_grad()
def analyze(subject: AnalysedModel, photos: Sequence[Photo], query: Query, max_tokens: int = MOST_TOKENS) -> Analysis:
    """Measures and draws a model's attention on images; layers with more than `max_tokens` tokens get no matrix."""
    subject.network.to(photos[0].batch["image"].device)
    calls = [observe(subject.network, photo.batch["image"][0][None]) for photo in photos]
    rows, left_out = [], {}
    for layer in calls[0]:
        try:
            found = layer_statistics([of_image[layer] for of_image in calls], channel=0, max_tokens=max_tokens)
        except Exception as error:  # a third party's mechanism may fail in any way
            left_out[layer] = f"{type(error).__name__}: {error}"
            continue
        if not found.keys() & {"", CHANNELS}:
            left_out[layer] = f"it has more than {max_tokens} tokens and no thin factors"
        for part, numbers in found.items():
            rows += [(layer, part, head, values) for head, values in enumerate(per_head(numbers))]
    tokens = {layer: call.grid.num_queries for layer, call in calls[0].items()}
    columns = {layer: call.grid.num_keys for layer, call in calls[0].items()}
    columns |= {layer: calls[0][layer].mechanism.head_dim for layer, part, *_ in rows if part == CHANNELS}
    maps: list[Maps] = []
    described, drawn = [], set()
    for photo, of_image in zip(photos, calls, strict=True):
        described.append(subject.describe(photo.batch))
        words, truth, masks = described[-1]
        beside = {}
        for title, mask in masks.items():
            below = np.asarray(Image.fromarray(photo.pixels).resize(mask.shape[::-1]))
            beside[title] = overlay(below, mask, subject.colours)
            drawn |= {*np.unique(mask).tolist()}
        caption = words + f" (true: {truth})" * bool(words and truth and not beside) or photo.name
        found_maps = attention_maps(photo.pixels, of_image, query, max_tokens)
        maps.append(found_maps._replace(caption=caption, beside=beside))
    drawn &= {*range(len(subject.class_names))}  # pixels without a class are of none
    return Analysis(subject, rows, tokens, columns, maps, described, left_out | maps[0].left_out, sorted(drawn))


def galleries(one: Analysis) -> list[tuple[tuple[Image.Image, Image.Image], str]]:
    """Returns the maps of a model, on light and on dark paper, with their kinds."""
    found = []
    for kind in (kind for kind in KINDS if kind in one.maps[0].maps):
        light, dark = (_with_legend(gallery(one.maps, kind, paper), one, paper) for paper in (LIGHT, DARK))
        found.append(((light, dark), kind))
    return found


def _with_legend(picture: Image.Image, one: Analysis, paper: Paper) -> Image.Image:
    """Returns a picture of maps, and under it the colours and names of the classes in its masks."""
    if not one.drawn:
        return picture
    names = [printable(one.subject.class_names[number], lines=False) for number in one.drawn]
    below = legend(one.subject.colours[[*one.drawn]], names, picture.width, paper)
    whole = Image.new("RGB", (picture.width, picture.height + below.height))
    whole.paste(picture)
    whole.paste(below, (0, picture.height))
    return whole


def prediction_table(found: Sequence[Analysis], photos: Sequence[Photo]) -> list[list[str]]:
    """Returns the titles, and a row per image: its class, if one is known, and what each model predicts."""
    labelled = any(image.truth for image in found[0].described)
    table = [["image", *["true class"] * labelled, *(one.subject.name for one in found)]]
    for photo, *images in zip(photos, *(one.described for one in found), strict=True):
        table.append([photo.name, *[images[0].truth] * labelled, *(image.predicted for image in images)])
    return table


def heat_maps(found: Sequence[Analysis]) -> dict[str, str]:
    """Returns heat maps of `HEAT_MAPS`, as SVG: layers by models and their parts; none if nothing was measured."""
    columns = {f"{one.subject.name}\n{part or 'whole matrix'}": one.layers(part) for one in found for part in one.parts}
    layers = list(dict.fromkeys(layer for column in columns.values() for layer in column))
    pictures = {}
    for name in HEAT_MAPS if layers else ():
        index = STATISTICS.index(name)
        values = [[own[layer][index] if layer in own else np.nan for own in columns.values()] for layer in layers]
        title = f"{name.replace('_', ' ')} of each layer"
        pictures[name] = svg(heat_map(title, np.array(values), layers, list(columns)))
    return pictures


def write(found: Sequence[Analysis], photos: Sequence[Photo], folder: Path, command: str) -> Path:
    """Writes index.html, whose path it returns, statistics.csv, predictions.csv and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    statistics = ([one.subject.name, *row[:3], *row[3]] for one in found for row in one.rows)
    write_table(folder / "statistics.csv", [["model", "layer", "part", "head", *STATISTICS], *statistics])
    predictions = prediction_table(found, photos)
    write_table(folder / "predictions.csv", predictions)
    page = Page("Attention of " + ", ".join(one.subject.name for one in found))
    page.code(command)
    titles = list(dict.fromkeys(title for one in found for title in one.subject.about))
    abouts = [[one.subject.name, *(one.subject.about.get(title) for title in titles)] for one in found]
    page.table(["model", *titles], abouts)
    if pictures := heat_maps(found):
        page.heading("Ranks")
        page.pictures([(picture, name.replace("_", " ")) for name, picture in pictures.items()])
        for name, picture in pictures.items():
            write_text(folder / f"{name}.svg", picture)
    if any(image.predicted for one in found for image in one.described):
        page.heading("Predictions")
        page.table(predictions[0], predictions[1:])
    for number, one in enumerate(found):
        page.heading(one.subject.name)
        for pair, kind in galleries(one):
            write_picture(folder / f"maps_{number}_{kind}.png", pair[0])
            page.pictures([(pair, f"{kind}: {EXPLAINED[kind]} Negative values are drawn as 0.")])
        _statistics(page, one)
        if one.left_out:
            page.table(["left out", "why"], one.left_out.items())
    page.write(folder / "index.html")
    return folder / "index.html"


def _statistics(page: Page, one: Analysis) -> None:
    rows = []
    for part in one.parts:
        for layer, values in one.layers(part).items():
            number = dict(zip(STATISTICS, values, strict=True))
            number["entropy"] /= math.log(max(one.columns[layer], 2))
            cells = (f"{number[name]:{digits}}" for name, digits in COLUMNS.items())
            rows.append([layer, part or "whole", one.tokens[layer], *cells])
    rows.sort(key=lambda row: list(one.tokens).index(str(row[0])))
    page.table(["layer", "part", "tokens", *(name.replace("_", " ") for name in COLUMNS)], rows, TABLE)
