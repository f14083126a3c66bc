"""Blocks of hybrids: each choice learns the attention of each block of a teacher, and hybrids of them are compared."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.callbacks.report import write_table
from linvit.errors import UserError
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.hybrids.costs import Budget, Costs, call, measure_costs
from linvit.io.files import rewriting, write_text
from linvit.io.plain_text import read_csv
from linvit.io.reading import read_text
from linvit.io.signals import STOP, Stopped
from linvit.linearization.distillation import (
    HOSTS,
    Distillation,
    Matching,
    first_tensor,
    last_features,
    matched_layers,
)
from linvit.linearization.student import linearize
from linvit.registry import Spec
from linvit.weights import torch_file

Kinds = tuple[int, ...]
"""A hybrid: for each block 0, which keeps the teacher's attention, or the number of a choice from 1."""
BATCHES = 4  # of images that are held out
SAVED = 30.0  # seconds of training that a kill may lose
WARM_UP = 0.1  # of the steps
TABLE = "hybrids.csv"


class Blocks:
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
        once = isinstance(images, Iterator)
        first = None if once else next(iter(images), None)
        if not isinstance(first, Tensor) or first.ndim != 4:
            given = "an iterator" if once else "no batch" if first is None else f"batches of {type(first).__name__}"
            raise UserError(
                f"`images` must give batches of images (B, C, H, W), the same whenever it is iterated, such as a list "
                f"or a DataLoader of images without labels; got {given}"
            )
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
            path = self.folder and self.folder / f"blocks-{digest(spec)}.pt"
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
        """Returns a hybrid of trained blocks."""
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
        if budget.kind == "softmax":
            return Costs([[float(len(kinds) > 1)] + [0.0] * len(self.choices) for kinds in self.kinds], 0.0)
        size = budget.size or self.size
        path = (
            self.folder and self.folder / f"costs-{budget.kind}-{digest([self.choices, size, str(self.device)])}.json"
        )
        if path and path.exists():
            return Costs(**json.loads(read_text(path)))
        networks = [self.teacher, *(self._student(spec).eval() for spec in self.choices)]
        image = torch.zeros(1, self.channels, *size, device=self.device)
        found = measure_costs(networks, self.layers, image, budget.kind)
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
def features(network: nn.Module, images: Tensor) -> list[Tensor]:
    """The last features of a network, behind its final norm if it has one."""
    found: list[Tensor] = []
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda _, __, output: found.append(first_tensor(output)))
        for name in last_features(network)
    ]
    call(network, images)
    for hook in hooks:
        hook.remove()
    return found


def _endless(images: Iterable[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from images


def digest(value: Any) -> str:
    """Returns 12 hexadecimal digits for a value, for names of files."""
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:12]
