"""The page that `linvit analyze` writes."""

import math
from collections.abc import Sequence
from pathlib import Path

from linvit.analysis.layer_statistics import STATISTICS
from linvit.experiments.analyze import Found, Photo, prediction_table
from linvit.experiments.page import Either, Page

EXPLAINED = {
    "weights": "The query token's row of the equivalent matrix, mean over heads and channels.",
    "focus": "Each patch's share in the query token's output: how Hydra attention can be seen, too.",
}
TABLE = (
    "Rank: singular values above max(N, M) times the float64 epsilon of the largest. Effective rank: exp of the "
    "entropy of the singular values (Roy & Vetterli 2007). Entropy: of the rows' magnitudes over log M, so that 1 is "
    "uniform attention. Top 5: share of the five largest weights. Distance: mean distance of the keys from the "
    "query's patch, in patches. Negative: share of the magnitudes that is negative. All are means over heads and "
    "images; where matrices differ per channel, of channel 0; of windows, of the first one. The part 'channels' is no "
    "matrix over tokens: the mechanism (xca) mixes the channels of a head, and these are the numbers of that matrix."
)


def write_page(
    path: Path,
    found: Sequence[Found],
    photos: Sequence[Photo],
    pictures: dict[str, list[tuple[Either, str]]],
    heat_maps: Sequence[tuple[Either, str]],
    command: str,
) -> None:
    """Writes the page of an analysis.

    Args:
        path: Of the file.
        found: What was found of each model.
        photos: The images.
        pictures: The galleries of each model, with their kinds.
        heat_maps: Heat maps of statistics, with captions.
        command: The command that gives this page.
    """
    page = Page("Attention of " + ", ".join(one.subject.name for one in found))
    page.code(command)
    titles = list(dict.fromkeys(title for one in found for title in one.subject.about))
    page.table(
        ["model", *titles],
        [[one.subject.name, *(one.subject.about.get(title) for title in titles)] for one in found],
    )
    if heat_maps:
        page.heading("Ranks")
        page.pictures(heat_maps)
    if any(word for one in found for word in one.predictions):
        page.heading("Predictions")
        titles, *rows = prediction_table(found, photos)
        page.table(titles, rows)
    for one in found:
        page.heading(one.subject.name)
        for picture, kind in pictures.get(one.subject.name, []):
            page.pictures([(picture, f"{kind}: {EXPLAINED[kind]} Negative values are drawn as 0.")])
        _statistics(page, one)
        if one.left_out:
            page.table(["left out", "why"], one.left_out.items())
    page.write(path)


def _statistics(page: Page, one: Found) -> None:
    parts = dict.fromkeys(part for _, part, _, _ in one.rows)
    rows = []
    for part in parts:
        for layer, values in one.layers(part).items():
            number = dict(zip(STATISTICS, values, strict=True))
            rows.append(
                [
                    layer,
                    part or "whole",
                    one.tokens[layer],
                    f"{number['rank']:.1f}",
                    f"{number['effective_rank']:.1f}",
                    f"{number['stable_rank']:.2f}",
                    f"{number['spectral_norm']:.3g}",
                    f"{number['entropy'] / math.log(max(one.columns[layer], 2)):.3f}",
                    f"{number['top_share']:.3f}",
                    f"{number['attention_distance']:.2f}",
                    f"{number['negative_share']:.3f}",
                ]
            )
    rows.sort(key=lambda row: list(one.tokens).index(str(row[0])))
    names = ["rank", "effective rank", "stable rank", "spectral norm", "entropy", "top 5", "distance", "negative"]
    page.table(["layer", "part", "tokens", *names], rows, TABLE)
    with page.folded("Each head"):
        cells = (
            [layer, part or "whole", str(head), *(f"{v:.4g}" for v in values)] for layer, part, head, values in one.rows
        )
        page.table(["layer", "part", "head", *(name.replace("_", " ") for name in STATISTICS)], cells)
