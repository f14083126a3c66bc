"""Scores of students and rivals trained for equal times from a trained network, on its held-out images."""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.advice.bench import Bench
from linvit.advice.subject import Subject, backbone_of, find_subject
from linvit.advice.verdict import UNCHANGED, Measured, Row, Score
from linvit.data import ClassificationData
from linvit.errors import UserError
from linvit.linearization.distillation import Distillation, Matching, first_tensor

HELD_OUT = 1000  # images that are scored, at most
BATCH = 16
LEARNING_RATE, WARM_UP, DECAY = 2e-4, 0.05, 0.05
LABELLED, ALIKE = "top-1 accuracy", "cosine of tokens with the unchanged network's"


class Resized(nn.Module):
    """A network that gets its images (B, C, H, W) at another size."""

    def __init__(self, network: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.backbone, self.size = network, size

    def forward(self, images: Tensor) -> Any:
        """Resizes the images, then calls the network."""
        return self.backbone(self.resized(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """Returns tokens of the resized images."""
        return tokens(self.backbone, self.resized(images))

    def resized(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, h, w)."""
        return F.interpolate(images, self.size, mode="bilinear", antialias=True)


class Quality:
    """Trains rows of one size for equal times, and scores them.

    With labels of the network's own classes, all learn from labels and from its logits, and top-1 accuracy is the
    score. Else they learn its tokens, and the cosine of these is the score. Students, which have its layers, learn its
    attention besides (`Distillation`).

    Args:
        subject: The network, with trained weights.
        source: A source of images, as `--data.source`.
        hours: For all rows together, without scoring.
        bench: Device and clock.

    Raises:
        UserError: The images cannot be read, or the network has no trained weights or does not take them.
    """

    def __init__(self, subject: Subject, source: str, hours: float, bench: Bench) -> None:
        self.subject, self.source, self.hours, self.bench = subject, source, hours, bench
        self.device = bench.settings.device
        teacher = self._prepare(subject.own)
        batch = next(self.batches(training=True))
        with torch.no_grad():
            out = teacher(batch["image"])
            _ = tokens(teacher, batch["image"])
        classes = self.data.num_classes or 0
        same = isinstance(out, Tensor) and out.ndim == 2 and out.shape[1] == classes > 0
        names = subject.class_names
        self.labelled = same and (names is None or self.data.class_names in (None, names))
        self.about = LABELLED if self.labelled else ALIKE
        if classes and not self.labelled:
            self.about += f" (the network does not have the {classes} classes of '{source}')"

    def _prepare(self, size: tuple[int, int]) -> nn.Module:
        """Reads the data at a size and returns the trained network."""
        try:
            data = ClassificationData(self.source)
            labels = data.num_classes is not None and not data.masks_found
        except UserError:  # then the images alone
            labels = False
        workers = 0 if torch.device(self.device).type == "cpu" else 4
        options: dict[str, Any] = {
            "batch_size": BATCH,
            "num_workers": workers,
            "img_size": list(size),
            "labels": labels,
            "seed": 0,
        }
        self.data = ClassificationData(self.source, **options, **self.subject.images)
        self.data.setup("fit")
        self.size = size
        return self._on_device(self.subject.trained(size))

    def _on_device(self, network: nn.Module) -> nn.Module:
        return network.to(self.device, torch.float32).eval().requires_grad_(False)

    def batches(self, training: bool) -> Iterator[dict[str, Any]]:
        """Yields endless training batches, or batches of held-out images, on the device."""
        loader, epoch = self.data.train_dataloader() if training else self.data.val_dataloader(), 0
        while True:
            if training and hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for batch in loader if training else islice(loader, math.ceil(HELD_OUT / BATCH)):
                moved: dict[str, Any] = move_data_to_device(batch, torch.device(self.device))
                self.data.finish(moved)
                yield moved
            epoch += 1
            if not training:
                return

    def measure(self, size: Measured, told: Callable[[str], None]) -> None:
        """Gives a score to the unchanged network, to rivals, and to the quickest mechanism of each placement."""
        teacher = self._prepare(size.img_size)
        now = next(row for row in size.rows if row.name == UNCHANGED)
        with torch.no_grad():
            self._score(now, teacher, teacher)
        told(_line(now, self.about))
        rows = self._rows(size, now)
        for row in list(rows):  # rows that fail must fail before hours of training
            self.bench.say(f"{size.size}: a first step of {row.name}")
            try:
                self._train(row, teacher, 0.0)
            except Exception as error:  # of third-party networks
                size.notes.append(
                    f"{size.size}: {row.name} was not trained: {str(error).strip().partition(chr(10))[0]}"
                )
                rows.remove(row)
        seconds = 3600 * self.hours / max(len(rows), 1)
        self.bench.end += 3600 * self.hours
        for row in rows:
            network, steps = self._train(row, teacher, seconds)
            with torch.no_grad():
                self._score(row, network, teacher)
            assert row.score is not None
            row.score.steps, row.score.trained = steps, seconds
            told(_line(row, self.about))

    def _rows(self, size: Measured, now: Row) -> list[Row]:
        rows = [row for row in size.rows if row.kind in ("windows", "loses quality") and row.seconds]
        mechanisms = sorted((row for row in size.rows if row.kind == "mechanism"), key=lambda row: row.median)
        placed = {row.placement: row for row in reversed(mechanisms)}
        if self.labelled:
            rows.append(Row(f"{UNCHANGED}, trained as long", "softmax", now.softmax_blocks, now.seconds))
            size.rows.append(rows[-1])
        return [*rows, *placed.values()]

    def _network(self, row: Row, teacher: nn.Module) -> nn.Module:
        if row.model:
            return find_subject(row.model).trained(self.size)
        if row.img_size:
            return Resized(self.subject.trained(row.img_size), row.img_size)
        made = copy.deepcopy(teacher)
        return self.subject.with_attention(made, row.attention, self.size) if row.attention else made

    def _train(self, row: Row, teacher: nn.Module, seconds: float) -> tuple[nn.Module, int]:
        """Trains for so many seconds of the clock, at least a step; returns the network and the number of steps."""
        torch.manual_seed(0)
        network = self._network(row, teacher).to(self.device, torch.float32).requires_grad_(True).train()
        batches = self.batches(training=True)
        first = next(batches)
        distillation = None
        if row.attention:
            parts: dict[str, Any] = {"logit_weight": 1.0} if self.labelled else {"feature_weight": 1.0}
            distillation = Distillation(teacher, network, Matching(**parts))
        elif not self.labelled:
            own, target = tokens(network, first["image"]), tokens(teacher, first["image"])
            if own.shape[-1] != target.shape[-1]:
                network.projection = nn.Linear(own.shape[-1], target.shape[-1]).to(self.device)
        optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)
        start, steps, batch = self.bench.clock(), 0, first
        while True:
            passed = min(1.0, (self.bench.clock() - start) / seconds) if seconds else 0.0
            if steps and (passed == 1 or not seconds):
                break
            rate = min(1.0, passed / WARM_UP + 0.05) * 0.5 * (1 + math.cos(math.pi * passed))
            for group in optimiser.param_groups:
                group["lr"] = rate * LEARNING_RATE
            loss = self._loss(network, teacher, distillation, batch)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            steps += 1
            self.bench.say(f"{row.name}: step {steps}, {passed:.0%} of its {seconds / 60:.0f} minutes")
            batch = next(batches)
        if distillation is not None:
            distillation.close()
        return network.eval(), steps

    def _loss(
        self, network: nn.Module, teacher: nn.Module, distillation: Distillation | None, batch: dict[str, Any]
    ) -> Tensor:
        images = batch["image"]
        if not self.labelled:
            if distillation is not None:
                network(images)
                return distillation.loss()
            with torch.no_grad():
                target = tokens(teacher, images)
            return (1 - self._cosine(network, images, target)).mean()
        logits = network(images)
        loss = F.cross_entropy(logits, batch["label"])
        if distillation is not None:
            return loss + distillation.loss()
        with torch.no_grad():
            target = teacher(images).log_softmax(1)
        return loss + F.kl_div(logits.log_softmax(1), target, reduction="batchmean", log_target=True)

    def _cosine(self, network: nn.Module, images: Tensor, target: Tensor) -> Tensor:
        """Returns the cosine (B,) of a network's tokens with the target's (B, N, C), mean over tokens."""
        own, project = tokens(network, images), getattr(network, "projection", None)
        own = own if project is None else project(own)
        if own.shape[1] != target.shape[1]:
            prefix = int(getattr(backbone_of(network), "num_prefix_tokens", 0))
            prefix = prefix if isinstance(prefix, int) and target.shape[1] > prefix else 0
            own = resized_tokens(own, target.shape[1], prefix, images.shape[-2] / images.shape[-1])
        return F.cosine_similarity(own, target, dim=-1).mean(1)

    def _score(self, row: Row, network: nn.Module, teacher: nn.Module) -> None:
        values, pooled = list[Tensor](), (list[Tensor](), list[Tensor]())
        for batch in self.batches(training=False):
            images = batch["image"]
            if self.labelled:
                values.append((network(images).argmax(1) == batch["label"]).float())
                continue
            target = tokens(teacher, images)
            values.append(self._cosine(network, images, target))
            for found, one in zip(pooled, (tokens(network, images), target), strict=True):
                found.append(one.mean(1))
        agreement = None
        if not self.labelled:
            near = [neighbours(torch.cat(found)) for found in pooled]
            agreement = float((near[0] == near[1]).float().mean())
        row.score = Score(torch.cat(values).cpu().tolist(), agreement)


def tokens(network: nn.Module, images: Tensor) -> Tensor:
    """Returns last features of a backbone, or of that of a dense network, as tokens (B, N, C); else the output."""
    backbone: Any = network if isinstance(network, Resized) else backbone_of(network)
    found = first_tensor((getattr(backbone, "forward_features", None) or network)(images))
    if found.ndim == 4:  # (B, H, W, C) of Swin, else (B, C, H, W)
        last = found.shape[-1] == getattr(backbone, "num_features", None)
        return found.flatten(1, 2) if last else found.flatten(2).mT
    return found.float() if found.ndim == 3 else found.flatten(1)[:, None].float()


def resized_tokens(x: Tensor, count: int, prefix: int, aspect: float) -> Tensor:
    """Returns tokens (B, N, C) of a grid behind prefix tokens, H = aspect x W, as (B, count, C)."""
    old, new = x.shape[1] - prefix, count - prefix
    (height, width), size = (
        (round(math.sqrt(number * aspect)), number // round(math.sqrt(number * aspect))) for number in (old, new)
    )
    patches = x[:, prefix:].mT.unflatten(2, (height, width))  # (B, C, h, w)
    return torch.cat([x[:, :prefix], F.interpolate(patches, size, mode="bilinear").flatten(2).mT], 1)


def neighbours(features: Tensor) -> Tensor:
    """Returns the number (N,) of the nearest other row by the cosine, of features (N, C)."""
    unit = F.normalize(features.float(), dim=1)
    return (unit @ unit.mT).fill_diagonal_(-math.inf).argmax(1)


def _line(row: Row, about: str) -> str:
    assert row.score is not None
    agreement = "" if row.score.agreement is None else f", 1-NN agreement {row.score.agreement:.3f}"
    return f"{row.name}: {about.partition(' (')[0]} {row.score.mean:.3f}{agreement}, {row.score.steps} steps"
