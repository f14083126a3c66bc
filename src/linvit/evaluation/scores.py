"""Scores of a network on sets of images: accuracy, calibration, corruption errors, throughput and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from tqdm import tqdm

from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import EvalSampler
from linvit.data.sources.images import collate
from linvit.errors import UserError
from linvit.evaluation.corruptions import ALEXNET, SEVERITIES
from linvit.evaluation.model import EvaluatedModel
from linvit.evaluation.sets import Answers, ImageSet
from linvit.experiments.measure import interleaved, peak_memory

BINS = 15
IMAGENET = ("n01440764", "tench, Tinca tinca")  # names of the first of its 1,000 classes


class Score(NamedTuple):
    """Row of the table; `clean` is the top-1 of the clean images of the same classes, where a set lacks some classes.

    `bins` are the non-empty ones of 15 bins of probability: images, accuracy, mean probability.
    """

    set: str
    size: tuple[int, int]
    images: int
    classes: int
    top1: float
    nll: float
    ece: float
    bins: list[tuple[int, float, float]]
    clean: float | None = None
    corruption: str | None = None
    severity: int | None = None
    images_per_second: float | None = None
    peak_memory: int | None = None


class Evaluator:
    """Scores a network on all devices, each with a share of the images; the results are those of a single device."""

    def __init__(self, model: EvaluatedModel, fabric: Fabric, batch_size: int, num_workers: int) -> None:
        self.model, self.fabric = model, fabric
        self.batch_size, self.num_workers = batch_size, num_workers

    def __call__(self, clean: Sequence[ImageSet], others: Sequence[ImageSet], sizes: Sequence[int]) -> list[Score]:
        """Returns the scores of all sets; `clean` are images with other labels, the first also at other sizes."""
        nominal: Any = tuple(self.model.preprocessing.size or ())
        costs = {size: self.cost(size) for size in dict.fromkeys([nominal, *((side, side) for side in sizes)])}
        some = {each.name: each.classes for each in others if clean and {*each.classes} < {*clean[0].classes}}
        same = [clean[0]._replace(name=name, classes=classes) for name, classes in some.items()]
        scores = self.score([*clean, *same], nominal)
        on_clean = {each.set: each.top1 for each in scores[len(clean) :]}
        del scores[len(clean) :]
        for size in [*costs][1:]:
            scores += self.score(clean[:1], size)
        for each in others:
            scores += [score._replace(clean=on_clean.get(each.name)) for score in self.score([each], nominal)]
        return [score._replace(**costs[score.size]) for score in scores]

    @torch.inference_mode()
    def score(self, sets: Sequence[ImageSet], size: tuple[int, int]) -> list[Score]:
        """Returns the scores of sets of the same images."""
        if not sets:
            return []
        prepared = replace(self.model.preprocessing, size=size)
        if sets[0].kind is not None:
            prepared = replace(prepared, crop_pct=1.0)  # the images of ImageNet-C are already cropped
        images, rank = sets[0].images(prepared.transform), self.fabric.global_rank
        sampler = EvalSampler(len(images), rank, self.fabric.world_size)
        loader = make_loader(images, self.batch_size, self.num_workers, collate, sampler)
        found = torch.zeros(len(sets), len(images), 3, device=self.fabric.device)
        said = " ".join(map(str, [sets[0].name, *(sets[0].kind or ())]))
        for batch in tqdm(loader, said, unit=" batches", disable=None if rank == 0 else True):
            logits = self.model(batch["image"].to(self.fabric.device)).double().cpu()
            for own, each in zip(found, sets, strict=True):
                answers = [each.answers[row] for row in batch["index"]]
                own[batch["index"]] = outcomes(logits, answers, each.classes).to(own)
        whole: Any = self.fabric.all_reduce(found, reduce_op="sum")
        return [summary(each, size, own) for each, own in zip(sets, whole.cpu(), strict=True)]

    @torch.inference_mode()
    def cost(self, size: Any) -> dict[str, Any]:
        """Measures images per second, without loading, and peak memory in bytes, if torch reports it, at full batch."""
        prepared, device = self.model.preprocessing, self.fabric.device
        dtype = torch.float32 if prepared.value_range else torch.uint8
        images = torch.zeros(self.batch_size, prepared.reader.bands.channels, *size, dtype=dtype, device=device)
        try:
            self.model(images)
        except Exception as error:  # of third-party networks
            said = f"the network does not take images of {size[0]}x{size[1]}: {error}"
            raise UserError(said.partition("\n")[0]) from error
        timing = interleaved({"network": lambda: self.model(images)}, budget=0.5, device=device)["network"]
        peak = peak_memory(lambda: self.model(images), device) if hasattr(self.model.network, "parameters") else None
        return {"images_per_second": self.batch_size / timing.median, "peak_memory": peak}


def outcomes(logits: Tensor, answers: Answers, classes: Sequence[int]) -> Tensor:
    """Returns (B, 3) for logits (B, K) and a choice among some classes: correctness, probability, and the NLL.

    If several classes are right, the NLL is that of their total probability. NaN for an image without a right class.
    """
    right = torch.zeros(logits.shape, dtype=torch.bool)
    for row, own in enumerate(answers):
        right[row, [*own]] = True
    right, logs = right[:, [*classes]], logits[:, [*classes]].log_softmax(1)
    confidence, choice = logs.exp().max(1)
    nll = -logs.masked_fill(~right, -torch.inf).logsumexp(1)
    found = torch.stack([right.gather(1, choice[:, None])[:, 0].to(logits.dtype), confidence, nll], 1)
    return found.masked_fill(~right.any(1, keepdim=True), torch.nan)


def summary(of: ImageSet, size: tuple[int, int], found: Tensor) -> Score:
    """Returns the score of outcomes (N, 3) of a set, ignoring NaN.

    The expected calibration error is that of Guo et al. 2017. Results are rounded so that the batch size has no effect.
    """
    right, confidence, nll = found[~found[:, 0].isnan()].double().numpy().T
    if not len(right):
        raise UserError(f"no image of '{of.name}' has a label among the classes that can be chosen")
    counts, hits, sums = (np.histogram(confidence, BINS, (0, 1), weights=own)[0] for own in (None, right, confidence))
    bins = [(int(n), float(a / n), round(float(c / n), 6)) for n, a, c in zip(counts, hits, sums, strict=True) if n]
    ece = np.abs(hits - sums).sum() / len(right)
    figures = float(right.mean()), round(float(nll.mean()), 6), round(float(ece), 6), bins
    corruption, severity = of.kind or (None, None)
    return Score(of.name, size, len(right), len(of.classes), *figures, corruption=corruption, severity=severity)


def corruption_errors(top1: Mapping[tuple[str, int], float], published: bool) -> dict[str, float]:
    """Returns the error of each corruption, the mean over its severities, divided by AlexNet's if `published` (CE)."""
    over = ALEXNET if published else {}
    names = dict.fromkeys(name for name, _ in top1)
    return {name: sum(1 - top1[name, each] for each in SEVERITIES) / 5 / over.get(name, 1.0) for name in names}


def is_imagenet(classes: Sequence[str], size: Sequence[int]) -> bool:
    """Returns True if AlexNet's published errors are for these classes and images."""
    return len(classes) == 1000 and classes[0] in IMAGENET and tuple(size) == (224, 224)
