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
    """The sets to score; the clean one, if there is any, with ReaL's labels, too, and at further sizes."""

    clean: Sequence[ImageSet] = ()
    others: Sequence[ImageSet] = ()
    sizes: Sequence[tuple[int, int]] = ()


Bin = tuple[int, float, float]
"""Images whose choice has a probability within a fifteenth, their accuracy, and their mean probability."""


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
        nominal: Any = tuple(self.model.preprocessing.size or ())
        costs = {size: self.cost(size) for size in dict.fromkeys([nominal, *work.sizes])}
        some = [each for each in work.others if work.clean and {*each.classes} < {*work.clean[0].classes}]
        same = [work.clean[0]._replace(name=each.name, classes=each.classes) for each in some]
        scores = self.score([*work.clean, *same], nominal)
        clean = {each.set: each.top1 for each in scores[len(work.clean) :]}
        scores = scores[: len(work.clean)]
        for size in [each for each in costs if each != nominal]:
            scores += self.score(work.clean[:1], size)
        for each in work.others:
            scores += [score._replace(clean=clean.get(each.name)) for score in self.score([each], nominal)]
        return [
            each._replace(images_per_second=costs[each.size][0], peak_memory=costs[each.size][1]) for each in scores
        ]

    @torch.inference_mode()
    def score(self, sets: Sequence[ImageSet], size: tuple[int, int]) -> list[Score]:
        """The scores of sets of the same images, for each kind of corruption."""
        if not sets:
            return []
        kinds = sets[0].kinds
        images = Variants(sets[0].images(replace(self.model.preprocessing, size=size).transform), kinds)
        ranks = self.fabric.global_rank, self.fabric.world_size
        loader = make_loader(images, *self.loading, collate, EvalSampler(len(images), *ranks))
        found = torch.zeros(len(sets), len(images), 3, dtype=torch.float64)
        for batch in tqdm(loader, sets[0].name, unit=" batches", disable=None if ranks[0] == 0 else True):
            logits = self.model(batch["image"].to(self.fabric.device)).double().cpu()
            rows = batch["index"] // len(kinds)
            for own, each in zip(found, sets, strict=True):
                own[batch["index"]] = outcomes(logits, [each.answers[row] for row in rows], each.classes)
        whole: Any = self.fabric.all_reduce(found.to(self.fabric.device), reduce_op="sum")
        shares = whole.cpu().view(len(sets), -1, len(kinds), 3)
        return [
            summary(each, size, i, own[:, i]) for each, own in zip(sets, shares, strict=True) for i in range(len(kinds))
        ]

    @torch.inference_mode()
    def cost(self, size: Any) -> tuple[float, int | None]:
        """Images per second and peak memory in bytes, where torch sees it, of a full batch, without loading.

        Raises:
            UserError: If the network does not take images of the size.
        """
        prepared, device = self.model.preprocessing, self.fabric.device
        dtype = torch.float32 if prepared.value_range else torch.uint8
        images = torch.zeros(self.loading[0], prepared.reader.bands.channels, *size, dtype=dtype, device=device)
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


def summary(of: ImageSet, size: tuple[int, int], kind: int, found: Tensor) -> Score:
    """The score of outcomes (N, 3) of a set with one of its corruptions, without those that are NaN."""
    right, confidence, nll = found[~found[:, 0].isnan()].T.contiguous()
    if not len(right):
        raise UserError(f"no image of '{of.name}' has a label among the classes that can be chosen")
    bins = calibration(right, confidence)
    ece = sum(images * abs(accuracy - mean) for images, accuracy, mean in bins) / len(right)
    figures = float(right.mean()), rounded(nll.mean()), rounded(ece), bins
    corruption, severity = of.kinds[kind] or (None, None)
    return Score(of.name, size, len(right), len(of.classes), *figures, corruption=corruption, severity=severity)


def calibration(right: Tensor, confidence: Tensor) -> list[Bin]:
    """The bins that are not empty, of 15 of equal width (Guo et al. 2017)."""
    number = torch.bucketize(confidence, torch.linspace(0, 1, BINS + 1, dtype=confidence.dtype), right=True) - 1
    number = number.clamp(max=BINS - 1)
    own = [number == each for each in number.unique()]
    return [(int(each.sum()), float(right[each].mean()), rounded(confidence[each].mean())) for each in own]


def rounded(figure: Any) -> float:
    """A figure without the digits of float32 that depend on how many images a batch has."""
    return round(float(figure), 6)


def corruption_errors(top1: Mapping[tuple[str, int], float], published: bool) -> dict[str, float]:
    """The error of each corruption, the mean over its severities, with `published` over AlexNet's (CE)."""
    over = ALEXNET if published else {}
    names = dict.fromkeys(name for name, _ in top1)
    return {name: sum(1 - top1[name, each] for each in range(1, 6)) / 5 / over.get(name, 1.0) for name in names}


def mean_corruption_error(errors: Mapping[str, float]) -> float | None:
    """The mean over the 15 corruptions of the mCE; None if one of them is missing."""
    return None if set(OF_THE_MCE) - errors.keys() else sum(errors[name] for name in OF_THE_MCE) / len(OF_THE_MCE)


def is_imagenet(classes: Sequence[str], size: Sequence[int]) -> bool:
    """Whether AlexNet's published errors are for these classes and images."""
    return len(classes) == 1000 and classes[0] in IMAGENET and min(size) >= LARGE
