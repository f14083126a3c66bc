"""Search of hybrids: which attention each block of a trained network gets, under a budget of time or operations.

Each choice learns for a short time to do what a block's softmax does on the teacher's inputs, in all blocks at once and
in each alone. Hybrids of these blocks are compared without further training, by the distance of their last features to
the teacher's, in a beam search. JetViT (Zou et al. 2026) searches hybrids of full, window and linear blocks by a beam,
too, and trains one network of all choices first.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from linvit.backbones.replace_attention import softmax_blocks
from linvit.errors import UserError, check_number
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.hybrids.blocks import Blocks, Kinds, specs_of
from linvit.experiments.hybrids.costs import UNITS, Budget, Costs
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.registry import Spec

ROUNDING = 1e-9
FINE = 2000  # points that a front of costs has at most
ABOUT = (
    "Every choice learned the attention of each block on the teacher's inputs, and no hybrid was trained as a whole. "
    "Distance: squared distance of the last features from the teacher's, over the square of the teacher's, on images "
    "that are held out: 0 is the same. Cost: {unit}, the sum of costs of blocks."
)


@dataclass
class HybridSearch:
    """Result of a search, made by `search_hybrid`.

    Attributes:
        choices: Specs that a block may have in place of the teacher's attention.
        found: The hybrid.
        measured: Distances of the last features of all measured hybrids to the teacher's, before they are trained.
        softmax: 1 for each block of the teacher with softmax attention, else 0.
    """

    choices: list[Spec]
    budget: Budget
    costs: Costs
    found: Kinds
    measured: dict[Kinds, float]
    softmax: list[int]

    @property
    def attention(self) -> list[Spec | None]:
        """One spec per block, ready for `attention=`; None keeps the teacher's."""
        return specs_of(self.choices, self.found)

    @property
    def cost(self) -> float:
        """Cost of the found hybrid, in the unit of the budget."""
        return self.costs.of(self.found)

    @property
    def distance(self) -> float:
        """Distance of the found hybrid."""
        return self.measured[self.found]

    def named(self) -> dict[str, Kinds]:
        """Hybrids with a name: the teacher, each choice in all blocks, and the found hybrid."""
        found = {"the teacher": (0,) * len(self.found)}
        found |= {f"{spec_label(one)} in all blocks": (i,) * len(self.found) for i, one in enumerate(self.choices, 1)}
        known = {name: kinds for name, kinds in found.items() if kinds in self.measured}
        return known | {f"found, {self.budget.kind}={self.budget.most:g}": self.found}

    def rows(self) -> list[list[str]]:
        """Rows of the named hybrids: name, softmax blocks, cost, distance, list for `--model.attention`."""
        rows = []
        for name, kinds in self.named().items():
            softmax = sum(own for own, kind in zip(self.softmax, kinds, strict=True) if not kind)
            numbers = f"{self.costs.of(kinds):.3g}", f"{self.measured[kinds]:.3g}"
            rows.append([name, str(softmax), *numbers, json.dumps(specs_of(self.choices, kinds))])
        return rows

    def __str__(self) -> str:
        """Returns the result as text, with the option that trains it."""
        unit = UNITS[self.budget.kind]
        return (
            f"found: cost {self.cost:.3g} {unit}, distance {self.distance:.3g}, {len(self.measured)} hybrids measured\n"
            f"--model.attention='{json.dumps(self.attention)}'"
        )

    def plot(self) -> str:
        """Distance over cost as SVG, with names at chosen points and a line through the best."""
        points = {kinds: (self.costs.of(kinds), distance) for kinds, distance in self.measured.items()}
        named = self.named()
        others = tuple(point for kinds, point in points.items() if kinds not in named.values())
        series = [Series(name, (points[kinds],), labels=(name,)) for name, kinds in named.items()]
        x, y = Axis(f"cost, {UNITS[self.budget.kind]}"), Axis("distance of the last features to the teacher's")
        return line_plot("Hybrids before training", [Series("other hybrids", others), *series], x, y, front="low")

    def add_to(self, page: Page) -> None:
        """Adds the table and the picture to a page."""
        titles = ["hybrid", "softmax blocks", "cost", "distance", "attention"]
        page.table(titles, self.rows(), ABOUT.format(unit=UNITS[self.budget.kind]))
        page.pictures([(self.plot(), "Distance over cost; the grey line joins the hybrids that no other beats.")], 720)


def search_hybrid(
    teacher: nn.Module,
    choices: Sequence[Spec],
    images: Iterable[Tensor],
    *,
    budget: str = "latency=0.6",
    held_out: Sequence[Tensor] = (),
    steps: int = 100,
    lr: float = 1e-3,
    beam: int = 4,
    seed: int = 0,
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> HybridSearch:
    """Finds the hybrid of a trained network that is nearest to it under a budget, before it is trained.

    Args:
        teacher: The trained network, as `linvit.linearize` takes it, on its device.
        choices: Specs that a block may have instead of its original attention.
        images: Batches (B, C, H, W) of one size to learn from; iterated again and again, each time in the same order.
        budget: `latency=0.6`: 60 % of the teacher's time for one image, here; `macs=0.6`; `softmax=2`: two blocks keep
            their attention. `@518` adds the side of the images for time or MACs, which is else that of `images`.
        held_out: Batches to measure distances on; () takes the first four of `images`.
        steps: Of training, for each choice. 0 compares untrained blocks: for `monarch` and other attentions that are
            near softmax before any step, which a short training can make worse.
        lr: Learning rate of AdamW, with warm-up and cosine decay.
        beam: Hybrids that are kept at each block.
        seed: Of new parameters.
        folder: Keeps trained blocks, costs and distances, so that a search that is interrupted, or has another budget
            or choices, continues with them. They belong to one teacher, its images, `steps`, `lr` and `seed`.
        say: Called with each line of progress.

    Raises:
        UserError: A choice is unknown or changes no block, or no hybrid is within the budget.

    Example:
        >>> found = linvit.search_hybrid(teacher, ["window", "hedgehog"], loader, budget="latency=0.6")
        >>> student = linvit.linearize(teacher, found.attention)
    """
    check_number("steps", steps, at_least=0, whole=True)
    check_number("beam", beam, at_least=1, whole=True)
    told, limit = say or (lambda text: None), Budget.read(budget)
    choices = [choices] if isinstance(choices, str | Mapping) else list(choices)
    if not choices:
        raise UserError("there are no choices: name one attention at least, such as choices=['window', 'hedgehog']")
    blocks = Blocks(teacher.eval(), choices, images, held_out, steps, lr, seed, folder, told)
    costs = blocks.costs(limit)
    least = [min(kinds, key=own.__getitem__) for own, kinds in zip(costs.blocks, blocks.kinds, strict=True)]
    cheapest = costs.of(least)
    if cheapest > limit.most * (1 + ROUNDING):
        _, *size = budget.partition("@")
        raise UserError(
            f"no hybrid of {', '.join(map(spec_label, choices))} is within {budget}: the cheapest costs {cheapest:.3g} "
            f"{UNITS[limit.kind]}. Write {limit.kind}={math.ceil(100 * cheapest) / 100:g}{''.join(size)}, or name "
            f"another choice"
        )
    blocks.train()
    keep = (0,) * len(blocks.kinds)
    singles = [[0.0] * len(own) for own in costs.blocks]
    for block, kinds in enumerate(blocks.kinds):
        for kind in kinds[1:]:
            singles[block][kind] = blocks.distance((*keep[:block], kind, *keep[block + 1 :]))
        alone = ", ".join(f"{spec_label(choices[kind - 1])} {singles[block][kind]:.3g}" for kind in kinds[1:])
        told(f"{blocks.layers[block]} alone, distance: {alone or 'no choice changes it'}")
    found = beam_search(blocks.kinds, costs, limit.most, blocks.distance, singles, beam)
    for kind in range(1, len(choices) + 1):  # for the picture
        blocks.distance(tuple(kind if kind in kinds else 0 for kinds in blocks.kinds))
    softmax = [softmax_blocks(teacher.get_submodule(name)) or 0 for name in blocks.layers]
    result = HybridSearch(choices, limit, costs, found, blocks.distances, softmax)
    told(str(result))
    return result


def beam_search(
    kinds: Sequence[Sequence[int]],
    costs: Costs,
    most: float,
    distance: Callable[[Kinds], float],
    singles: Sequence[Sequence[float]],
    beam: int,
) -> Kinds:
    """Decides block after block; returns the hybrid within the budget with the least distance.

    Blocks that are not decided keep the teacher's attention. A part is judged by its measured distance, plus the least
    distance that the other blocks add within the remaining budget, if `singles`, distances of blocks that are
    converted alone, added up.

    Args:
        kinds: The choices of each block.
        costs: Of blocks.
        most: The budget.
        distance: Measures a hybrid.
        singles: Distances by block and choice.
        beam: Parts that are kept.
    """
    depth = len(kinds)
    fronts = [[(0.0, 0.0)]]  # of the last blocks, none to all: cost and least added distance, rising cost
    for block in reversed(range(depth)):
        sums = sorted(
            (cost + costs.blocks[block][kind], extra + singles[block][kind])
            for cost, extra in fronts[0]
            for kind in kinds[block]
        )
        front = list[tuple[float, float]]()
        for cost, extra in sums:
            if not front or extra < front[-1][1]:
                front.append((cost, extra))
        fronts.insert(0, front if len(front) <= FINE else [*front[:: -(-len(front) // FINE)], front[-1]])
    parts: list[Kinds] = [()]
    for block in range(depth):
        judged = dict[Kinds, float]()
        for part in (part for before in parts for kind in kinds[block] for part in [(*before, kind)]):
            spent = costs.rest + sum(costs.blocks[i][kind] for i, kind in enumerate(part))
            added = [extra for cost, extra in fronts[block + 1] if spent + cost <= most * (1 + ROUNDING)]
            if added:
                judged[part] = distance((*part, *(0,) * (depth - len(part)))) + added[-1]
        parts = sorted(judged, key=lambda part: judged[part])[:beam]
    return parts[0]
