"""Search of hybrids: which attention each block of a trained network gets, under a budget of time or operations.

Each choice learns for a short time to do what a block's softmax does on the teacher's inputs, in all blocks at once and
in each alone. Hybrids of these blocks are compared without further training, by the distance of their last features to
the teacher's, in a beam search. JetViT (Zou et al. 2026) searches hybrids of full, window and linear blocks by a beam,
too, and trains one network of all choices first.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from linvit.analysis.operations import count_operations
from linvit.backbones.replace_attention import softmax_blocks
from linvit.backbones.stage import specs_per_layer
from linvit.callbacks.report import write_table
from linvit.errors import UserError, check_choice, check_number
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.measure import interleaved
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.image_size import image_size
from linvit.io.files import rewriting, write_text
from linvit.io.plain_text import read_csv
from linvit.io.reading import read_text
from linvit.io.signals import STOP, Stopped
from linvit.linearization.distillation import (
    HOSTS,
    Distillation,
    Matching,
    first_tensor,
    kind_of,
    last_features,
    matched_layers,
)
from linvit.linearization.student import linearize
from linvit.registry import Spec
from linvit.registry.layouts import is_layout, window_side
from linvit.runs.folder import run_name
from linvit.runs.resolve import root_of
from linvit.runs.run import Run
from linvit.tasks.teacher import fingerprint, given_options, teacher_network
from linvit.weights import torch_file

Kinds = tuple[int, ...]
"""A hybrid: for each block 0, which keeps the teacher's attention, or the number of a choice from 1."""
UNITS = {"latency": "of the teacher's time", "macs": "of the teacher's MACs", "softmax": "blocks that keep softmax"}
BATCHES = 4  # of images that are held out
TIMING = 20.0  # seconds to measure all blocks
SAVED = 30.0  # seconds of training that a kill may lose
WARM_UP = 0.1  # of the steps
ROUNDING = 1e-9
FINE = 2000  # points that a front of costs has at most
TABLE = "hybrids.csv"
ABOUT = (
    "Every choice learned the attention of each block on the teacher's inputs, and no hybrid was trained as a whole. "
    "Distance: squared distance of the last features from the teacher's, over the square of the teacher's, on images "
    "that are held out: 0 is the same. Cost: {unit}, the sum of costs of blocks."
)


class Budget(NamedTuple):
    """The most that a hybrid may cost.

    Attributes:
        kind: "latency", a share of the teacher's time for one image on this device; "macs", a share of its
            multiply-accumulates; "softmax", a number of blocks that keep the teacher's attention.
        most: The share, or the number.
        size: Image size (H, W) of the costs; None is the size of the images.
    """

    kind: str
    most: float
    size: tuple[int, int] | None = None

    @classmethod
    def read(cls, text: str) -> "Budget":
        """Reads a budget such as `latency=0.6`, `macs=0.6@518` (at 518 x 518 pixels) or `softmax=2`."""
        kind, _, given = text.partition("=")
        number, at, side = given.partition("@")
        check_choice("the budget's kind", kind, UNITS)
        try:
            most = float(number)
            sides = [int(one) for one in side.split("x")] if at else []
        except ValueError as error:
            raise UserError(f"budget '{text}' has no number. Write {kind}=0.6, or {kind}=0.6@518 for a size") from error
        whole = kind == "softmax"
        check_number(f"budget {kind}", int(most) if whole and most % 1 == 0 else most, at_least=0, whole=whole)
        return cls(kind, most, image_size(sides[0] if len(sides) == 1 else sides) if sides else None)


class Costs(NamedTuple):
    """Costs of blocks.

    Attributes:
        blocks: The cost of each choice, by block; the first is that of the teacher's attention.
        rest: The cost of all other parts.
    """

    blocks: list[list[float]]
    rest: float

    def of(self, kinds: Sequence[int]) -> float:
        """The cost of a hybrid."""
        return self.rest + sum(own[kind] for own, kind in zip(self.blocks, kinds, strict=True))


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
        """The cost of what was found, in the unit of the budget."""
        return self.costs.of(self.found)

    @property
    def distance(self) -> float:
        """The distance of what was found."""
        return self.measured[self.found]

    def named(self) -> dict[str, Kinds]:
        """Hybrids with a name: the teacher, each choice in all blocks, and what was found."""
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

    def write(self, path: Path) -> None:
        """Writes all measured hybrids as a CSV file."""
        rows = [
            [json.dumps(specs_of(self.choices, one)), self.costs.of(one), far] for one, far in self.measured.items()
        ]
        write_table(path, [["attention", "cost", "distance"], *rows])


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
    blocks = _Blocks(teacher.eval(), choices, images, held_out, steps, lr, seed, folder, told)
    costs = blocks.costs(limit)
    least = [min(kinds, key=own.__getitem__) for own, kinds in zip(costs.blocks, blocks.kinds, strict=True)]
    cheapest = costs.of(least)
    if cheapest > limit.most * (1 + ROUNDING):
        raise UserError(
            f"no hybrid of {', '.join(map(spec_label, choices))} is within {budget}: the cheapest costs {cheapest:.3g} "
            f"{UNITS[limit.kind]}. Write {limit.kind}={math.ceil(100 * cheapest) / 100:g}, or name another choice"
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
    that the rest of the blocks adds within what is left of the budget, if `singles`, distances of blocks that are
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


def find_hybrid(
    run: Run, budget: str, choices: Sequence[Spec] | None, steps: int
) -> tuple[list[Spec | None], HybridSearch | None]:
    """The list for `--model.attention` of a run, and on rank 0 the search, whose files are in a folder beside the runs.

    Other ranks wait for the list.
    """
    task, attention = run.task, run.task.hparams["attention"]
    if task.teacher is None or attention is None or isinstance(attention, list) or is_layout(attention):
        raise UserError(
            f"--budget searches among attentions; got --model.attention={json.dumps(attention)}. Write --choices "
            f"'[{{name: window, window_size: 7}}, hedgehog]', or one name as --model.attention"
        )
    cuda = torch.cuda.is_available() and run.config["trainer"]["accelerator"] != "cpu"
    teacher = teacher_network(task, task.teacher).to("cuda" if cuda else "cpu")
    img_size, seed = image_size(task.hparams["img_size"]), run.config["seed_everything"]
    names = attention_layers(linearize(teacher, attention, img_size))
    if choices is None:
        image = torch.zeros(1, task.hparams["in_chans"], *img_size, device=next(teacher.parameters()).device)
        tokens = inputs_of(teacher.eval(), names[:1], image)[0][1][0].shape[1]
        side = math.isqrt(tokens)
        window = {"name": "window", "window_size": window_side(side, min(14, math.ceil(side / 2)))}
        choices = [attention] if budget.startswith("softmax") else [window, attention]
    key = [fingerprint(teacher), img_size, seed, steps, run.config["data"]]
    folder = root_of(run.config) / run_name(run.config["config"]) / f"search-{_digest(key)}"
    path = folder / f"found-{_digest([budget, choices])}.json"
    while not path.exists() and rank_zero_only.rank:  # type: ignore[attr-defined]
        time.sleep(1)
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        return list(json.loads(read_text(path))), None
    run.data.setup("fit")
    images = _Images(run.data, run.data.train_dataloader)
    held_out = list(islice(_Images(run.data, run.data.val_dataloader), BATCHES))
    options: Any = {"budget": budget, "held_out": held_out, "steps": steps, "seed": seed, "folder": folder}
    found = search_hybrid(teacher, choices, images, **options, say=partial(print, flush=True))
    theirs: Any = given_options(task.teacher).get("attention")
    inner = getattr(teacher, "backbone", teacher)
    kept = specs_per_layer(theirs, inner, [name.removeprefix("backbone.") for name in names])
    specs = [theirs if own is None else own for own, theirs in zip(found.attention, kept, strict=True)]
    page = Page(f"search: {budget}")
    found.add_to(page)
    page.write(folder / "search.html")
    print(f"what was measured: {folder / 'search.html'}", flush=True)
    write_text(path, json.dumps(specs))
    return specs, found


class _Images:
    """The images of a data module's batches, the same each time."""

    def __init__(self, data: Any, loader: Callable[[], Iterable[Any]]) -> None:
        self.data, self.loader = data, loader

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.loader():
            self.data.finish(batch)
            yield batch["image"]


class _Blocks:
    """The blocks of a teacher with each choice: trained once, their costs, and distances of hybrids of them."""

    def __init__(
        self,
        teacher: nn.Module,
        choices: Sequence[Spec],
        images: Iterable[Tensor],
        held_out: Sequence[Tensor],
        steps: int,
        lr: float,
        seed: int,
        folder: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self.teacher, self.choices, self.images = teacher, choices, images
        self.steps, self.lr, self.seed, self.folder, self.say = steps, lr, seed, folder, say
        self.device = next(teacher.parameters()).device
        first = next(iter(images), None)
        if first is None:
            raise UserError("there are no images to learn from: `images` is empty")
        self.channels, self.size = first.shape[1], (first.shape[2], first.shape[3])
        self.held_out = list(held_out) or list(islice(images, BATCHES))
        students = [self._student(spec) for spec in choices]
        self.layers = attention_layers(students[0])
        changed = [matched_layers(teacher, student) for student in students]
        numbers = range(1, len(choices) + 1)
        self.kinds = [[0, *(i for i in numbers if name in changed[i - 1])] for name in self.layers]
        self.trained: list[dict[str, Tensor]] = []
        self.distances = self._read()
        self.targets: list[list[Tensor]] = []

    def _student(self, attention: Any) -> nn.Module:
        """A copy of the teacher with another attention, whose new parameters are the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return linearize(self.teacher, attention, self.size)

    def train(self) -> None:
        """Trains all choices that are not trained yet."""
        for number, spec in enumerate(self.choices):
            path = self.folder and self.folder / f"blocks-{_digest(spec)}.pt"
            state: dict[str, Any] = torch_file.load(path) if path and path.exists() else {"step": 0}
            if state["step"] < self.steps or "weights" not in state:
                state = self._transfer(spec, state, path)
            self.trained.append(state["weights"])
            said = f"{number + 1} of {len(self.choices)} choices"
            self.say(f"{spec_label(spec)}: trained for {self.steps} steps ({said})")

    def _transfer(self, spec: Spec, state: dict[str, Any], path: Path | None) -> dict[str, Any]:
        """Attention transfer: each block gets the teacher's inputs, and learns the teacher's outputs."""
        student = self._student(spec).train()
        distance = Distillation(self.teacher, student, Matching(attention_weight=1.0, attention_inputs="teacher"))
        inside = tuple(f"{name}." for name in distance.layers)
        trained = {name: one for name, one in student.named_parameters() if name.startswith(inside)}
        optimizer = torch.optim.AdamW(trained.values(), self.lr, weight_decay=0.0)
        if state["step"]:
            student.load_state_dict(state["weights"], strict=False)
            optimizer.load_state_dict(state["optimizer"])
        step, saved = state["step"], time.monotonic()

        def current() -> dict[str, Any]:
            weights = {name: one for name, one in student.state_dict().items() if name.startswith(inside)}
            return {"step": step, "weights": weights, "optimizer": optimizer.state_dict()}

        def save(found: dict[str, Any]) -> None:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with rewriting(path) as part:
                    torch.save(found, part)

        before, STOP.deferred = STOP.deferred, True
        try:
            for images in islice(_endless(self.images), step, self.steps):
                rate = min(1.0, (step + 1) / (WARM_UP * self.steps), 0.5 * (1 + math.cos(math.pi * step / self.steps)))
                for group in optimizer.param_groups:
                    group["lr"] = rate * self.lr
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self.seed + step)  # of dropout
                    distance.run(images.to(self.device))
                    loss = distance.loss()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if STOP.received or time.monotonic() - saved > SAVED:
                    save(current())
                    saved = time.monotonic()
                if STOP.received:
                    raise Stopped(STOP.received, step)
        finally:
            STOP.deferred = before
            distance.close()
        done = current() | {"optimizer": None}
        save(done)
        return done

    def network(self, kinds: Kinds) -> nn.Module:
        """A hybrid of trained blocks."""
        network = self._student(specs_of(self.choices, kinds))
        for name, kind in zip(self.layers, kinds, strict=True):
            if kind:
                own = {key: one for key, one in self.trained[kind - 1].items() if key.startswith(f"{name}.")}
                network.load_state_dict(own, strict=False)
        return network.eval()

    def distance(self, kinds: Kinds) -> float:
        """The distance of a hybrid to the teacher, measured once."""
        if kinds not in self.distances:
            self.targets = self.targets or [features(self.teacher, one.to(self.device)) for one in self.held_out]
            network, error, scale = self.network(kinds) if any(kinds) else self.teacher, 0.0, 0.0
            for images, targets in zip(self.held_out, self.targets, strict=True):
                for own, target in zip(features(network, images.to(self.device)), targets, strict=True):
                    error += float((own - target).square().sum())
                    scale += float(target.square().sum())
            self.distances[kinds] = error / scale
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                rows = ([json.dumps(specs_of(self.choices, key)), one] for key, one in self.distances.items())
                write_table(self.folder / TABLE, [["attention", "distance"], *rows, *self.others.items()])
        return self.distances[kinds]

    def _read(self) -> dict[Kinds, float]:
        """Distances that are known from an earlier search; those of other choices are kept in the file."""
        self.others, found = dict[str, float](), dict[Kinds, float]()
        numbers = {json.dumps(spec): number for number, spec in enumerate([None, *self.choices])}
        path = self.folder and self.folder / TABLE

        def parse(row: Mapping[str, str]) -> tuple[str, float]:
            return row["attention"], float(row["distance"])

        for text, distance in read_csv(path, "attention", parse) if path and path.exists() else []:
            names = [json.dumps(spec) for spec in json.loads(text)]
            if all(name in numbers for name in names):
                found[tuple(numbers[name] for name in names)] = distance
            else:
                self.others[text] = distance
        return found

    def costs(self, budget: Budget) -> Costs:
        """The cost of each choice in each block, and of all else; measured once."""
        count = len(self.choices) + 1
        if budget.kind == "softmax":
            return Costs([[float(len(kinds) > 1)] + [0.0] * (count - 1) for kinds in self.kinds], 0.0)
        size = budget.size or self.size
        key = [self.choices, size, str(self.device)]
        path = self.folder and self.folder / f"costs-{budget.kind}-{_digest(key)}.json"
        if path and path.exists():
            return Costs(**json.loads(read_text(path)))
        image = torch.zeros(1, self.channels, *size, device=self.device)
        call: Any = [count_operations] if budget.kind == "macs" else []
        works, names = dict[Any, Callable[[], Any]](), list[list[Any]]()
        for number, spec in enumerate([None, *self.choices]):
            network = self.teacher if spec is None else self._student(spec).eval()
            names.append([])
            for layer, args, kwargs in inputs_of(network, self.layers, image):
                given = [one.shape if isinstance(one, Tensor) else one for one in (*args, *kwargs.values())]
                shapes = [one.shape for one in layer.parameters()]
                alike = (number, str([given, shapes, kind_of(layer)]))  # such blocks are measured once
                works.setdefault(alike, partial(*call, layer, *args, **kwargs))
                names[-1].append(alike)
        works["all"] = partial(*call, self.teacher, image)
        with torch.no_grad():
            if budget.kind == "macs":
                values = {name: float(work().matmul) for name, work in works.items()}
            else:
                alone = self.device.type == "cpu" and torch.get_num_threads() == 1
                clock = time.process_time if alone else time.perf_counter
                timings = interleaved(works, budget=TIMING, device=self.device, clock=clock)
                values = {name: timing.median for name, timing in timings.items()}
        total = values["all"]
        blocks = [[values[own[block]] / total for own in names] for block in range(len(self.layers))]
        found = Costs(blocks, 1.0 - sum(own[0] for own in blocks))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(found._asdict()))
        return found


def specs_of(choices: Sequence[Spec], kinds: Kinds) -> list[Spec | None]:
    """The specs of a hybrid; None keeps what a block has."""
    return [choices[kind - 1] if kind else None for kind in kinds]


def attention_layers(network: nn.Module) -> list[str]:
    """Names of the attention layers of a network's backbone."""
    inside = "backbone." if hasattr(network, "backbone") else ""
    found = (name for name, layer in network.named_modules() if isinstance(layer, HOSTS))
    return [name for name in found if name.startswith(inside)]


@torch.no_grad()
def inputs_of(
    network: nn.Module, layers: Sequence[str], images: Tensor
) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Attention layers and their arguments in a forward pass."""
    found: dict[nn.Module, Any] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[layer] = layer, args, kwargs

    modules = [network.get_submodule(name) for name in layers]
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in modules]
    _run(network, images)
    for hook in hooks:
        hook.remove()
    return [found[layer] for layer in modules]


@torch.no_grad()
def features(network: nn.Module, images: Tensor) -> list[Tensor]:
    """The last features of a network, behind its final norm if it has one."""
    found: list[Tensor] = []
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda _, __, output: found.append(first_tensor(output)))
        for name in last_features(network)
    ]
    _run(network, images)
    for hook in hooks:
        hook.remove()
    return found


def _run(network: Any, images: Tensor) -> None:
    """Calls a network, without the head of a dense task."""
    (network.feature_maps if hasattr(network, "feature_maps") else network)(images)


def _endless(images: Iterable[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from images


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:12]
