"""What a network scores on sets of images: accuracy, calibration, corruption errors, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor
from tqdm import tqdm

from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import EvalSampler
from linvit.data.sources.images import collate
from linvit.errors import UserError
from linvit.evaluation.corruptions import ALEXNET, LARGE, OF_THE_MCE
from linvit.evaluation.model import EvaluatedModel
from linvit.evaluation.sets import Answers, ImageSet, Variants
from linvit.experiments.measure import interleaved, peak_memory

BINS = 15
IMAGENET = ("n01440764", "tench, Tinca tinca")
"""What the first of ImageNet's 1,000 classes is called."""


class Work(NamedTuple):
    """The sets to score, the clean one apart with ReaL's labels, further sizes of it, and corrupted sets."""

    clean: ImageSet | None = None
    real: Answers | None = None
    others: Sequence[ImageSet] = ()
    sizes: Sequence[tuple[int, int]] = ()
    corrupted: Sequence[tuple[ImageSet, Sequence[str]]] = ()


class View(NamedTuple):
    """What is right for each image, and the classes to choose among."""

    answers: Answers
    classes: Sequence[int]


class Bin(NamedTuple):
    """Images whose choice has a probability within a fifteenth, their accuracy, and their mean probability."""

    images: int
    accuracy: float
    confidence: float


class Score(NamedTuple):
    """A row of the table; `clean` is the top-1 of the clean images of the same classes, where a set has not all."""

    set: str
    size: tuple[int, int]
    images: int
    classes: int
    top1: float
    nll: float
    ece: float
    bins: list[Bin]
    clean: float | None = None
    corruption: str | None = None
    severity: int | None = None
    images_per_second: float | None = None
    peak_memory: int | None = None


class Evaluator:
    """Scores a network on all devices; each has a share of the images, and figures are those of a single one."""

    def __init__(self, model: EvaluatedModel, fabric: Fabric, batch_size: int, num_workers: int) -> None:
        self.model, self.fabric = model, fabric
        self.loading = batch_size, num_workers

    def __call__(self, work: Work) -> list[Score]:
        """The scores of all sets, one of each corruption and severity."""
        nominal = tuple(self.model.preprocessing.size or ())
        costs = {size: self.cost(size) for size in dict.fromkeys([nominal, *work.sizes])}
        scores: list[Score] = []
        same: dict[str, float] = {}
        if work.clean is not None:
            views = {"clean": View(work.clean.answers, work.clean.classes)}
            views |= {} if work.real is None else {"real": View(work.real, range(len(self.model.classes)))}
            parts = {each.name: each.classes for each in work.others if {*each.classes} < {*work.clean.classes}}
            views |= {f"clean {name}": View(work.clean.answers, classes) for name, classes in parts.items()}
            found = self.score(work.clean, nominal, views)
            same = {name: found.pop(f"clean {name}")[0].top1 for name in parts}
            scores += [score for each in found.values() for score in each]
            for size in [each for each in work.sizes if each != nominal]:
                scores += self.score(work.clean, size, {"clean": views["clean"]})["clean"]
        for each in work.others:
            (score,) = self.score(each, nominal, {each.name: View(each.answers, each.classes)})[each.name]
            scores.append(score._replace(clean=same.get(each.name)))
        for each, names in work.corrupted:
            kinds = [(name, severity) for name in names for severity in range(1, 6)]
            scores += self.score(each, nominal, {each.name: View(each.answers, each.classes)}, kinds)[each.name]
        return [
            each._replace(images_per_second=costs[each.size][0], peak_memory=costs[each.size][1]) for each in scores
        ]

    @torch.inference_mode()
    def score(
        self, of: ImageSet, size: Any, views: Mapping[str, View], kinds: Sequence[tuple[str, int] | None] = (None,)
    ) -> dict[str, list[Score]]:
        """The scores of each view of a set, one for each kind of corruption."""
        images = Variants(of.images(replace(self.model.preprocessing, size=size).transform), kinds)
        ranks = self.fabric.global_rank, self.fabric.world_size
        loader = make_loader(images, *self.loading, collate, EvalSampler(len(images), *ranks))
        found = {name: torch.zeros(len(images), 3, dtype=torch.float64) for name in views}
        for batch in tqdm(loader, of.name, unit=" batches", disable=None if ranks[0] == 0 else True):
            logits = self.model(batch["image"].to(self.fabric.device)).double().cpu()
            rows = batch["index"] // len(kinds)
            for name, view in views.items():
                found[name][batch["index"]] = outcomes(logits, [view.answers[row] for row in rows], view.classes)
        scores: dict[str, list[Score]] = {name: [] for name in views}
        for name, own in found.items():
            whole = self.fabric.all_reduce(own.to(self.fabric.device), reduce_op="sum").cpu()  # type: ignore[union-attr]
            for kind, part in zip(kinds, whole.view(-1, len(kinds), 3).unbind(1), strict=True):
                shown = kind or (None, None)
                scores[name].append(summary(name, size, len(views[name].classes), part, *shown))
        return scores

    @torch.inference_mode()
    def cost(self, size: Any) -> tuple[float, int | None]:
        """Images per second and peak memory in bytes, where torch sees it, of a full batch, without loading.

        Raises:
            UserError: If the network does not take images of the size.
        """
        prepared, device = self.model.preprocessing, self.fabric.device
        images = torch.zeros(self.loading[0], prepared.reader.bands.channels, *size, dtype=torch.uint8, device=device)
        try:
            self.model(images)
        except Exception as error:  # of anybody's network
            raise UserError(
                f"the network does not take images of {size[0]}x{size[1]}: {error}".partition("\n")[0]
            ) from error
        timing = interleaved({"network": lambda: self.model(images)}, budget=0.5, device=device)["network"]
        peak = peak_memory(lambda: self.model(images), device) if hasattr(self.model.network, "parameters") else None
        return len(images) / timing.median, peak


def outcomes(logits: Tensor, answers: Answers, classes: Sequence[int]) -> Tensor:
    """(B, 3) of logits (B, K), of a choice among some classes: whether it is right, its probability, and the NLL.

    Where several classes are right, the NLL is that of their total probability. NaN for an image without a right class.
    """
    right = torch.zeros(logits.shape, dtype=torch.bool)
    for row, own in enumerate(answers):
        right[row, [*own]] = True
    right, logs = right[:, [*classes]], logits[:, [*classes]].log_softmax(1)
    confidence, choice = logs.exp().max(1)
    nll = -logs.masked_fill(~right, -torch.inf).logsumexp(1)
    found = torch.stack([right.gather(1, choice[:, None])[:, 0].to(logits.dtype), confidence, nll], 1)
    return found.masked_fill(~right.any(1, keepdim=True), torch.nan)


def summary(name: str, size: Any, classes: int, found: Tensor, corruption: str | None, severity: int | None) -> Score:
    """The score of outcomes (N, 3), without those that are NaN."""
    right, confidence, nll = found[~found[:, 0].isnan()].T.contiguous()
    bins = calibration(right, confidence)
    ece = sum(each.images * abs(each.accuracy - each.confidence) for each in bins) / max(len(right), 1)
    top1 = float(right.mean())
    return Score(
        *(name, tuple(size), len(right), classes, top1, rounded(nll.mean()), rounded(ece), bins),
        corruption=corruption,
        severity=severity,
    )


def calibration(right: Tensor, confidence: Tensor) -> list[Bin]:
    """The bins that are not empty, of 15 of equal width (Guo et al. 2017)."""
    number = torch.bucketize(confidence, torch.linspace(0, 1, BINS + 1, dtype=confidence.dtype), right=True) - 1
    number = number.clamp(max=BINS - 1)
    own = [number == each for each in number.unique()]
    return [Bin(int(each.sum()), float(right[each].mean()), rounded(confidence[each].mean())) for each in own]


def rounded(figure: Any) -> float:
    """A figure without the digits of float32 that depend on how many images a batch has."""
    return round(float(figure), 6)


def corruption_errors(top1: Mapping[tuple[str, int], float], published: bool) -> dict[str, float]:
    """The error of each corruption, the mean over its severities, with `published` over AlexNet's (CE)."""
    errors: dict[str, list[float]] = {}
    for (name, _), score in top1.items():
        errors.setdefault(name, []).append(1 - score)
    means = {name: sum(each) / len(each) for name, each in errors.items()}
    return {name: mean / ALEXNET[name] if published and name in ALEXNET else mean for name, mean in means.items()}


def mean_corruption_error(errors: Mapping[str, float]) -> float | None:
    """The mean over the 15 corruptions of the mCE; None if one of them is missing."""
    return None if set(OF_THE_MCE) - errors.keys() else sum(errors[name] for name in OF_THE_MCE) / len(OF_THE_MCE)


def is_imagenet(classes: Sequence[str], size: Sequence[int]) -> bool:
    """Whether AlexNet's published errors are for these classes and images."""
    return len(classes) == 1000 and classes[0] in IMAGENET and min(size) >= LARGE
