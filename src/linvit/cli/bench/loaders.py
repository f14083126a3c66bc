"""The loaders that `linvit bench data` compares, each in one thread."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageDataset, auto_augment, create_loader

from linvit.data import ClassificationData
from linvit.data.transforms.classification import Augmentation, TrainTransform
from linvit.data.transforms.rand_augment import THREE_AUGMENT


def linvit_loader(data: ClassificationData, augmentation: Augmentation) -> Callable[[], Any]:
    """Makes our training loader with an augmentation."""

    def loader() -> Any:
        data.train_set.reader.transform = TrainTransform(data.size, augmentation, data.mean)
        return data.train_dataloader()

    return loader


def unknown_to_timm(folder: Path, given: Augmentation) -> list[str]:
    """The parts of a recipe that timm's loader cannot do: it would fail, or do something else."""
    unknown = [] if folder.is_dir() else ["images outside a folder"]
    if given.crop_scale is None:
        unknown.append("crop_scale: null")
    if given.auto_augment == THREE_AUGMENT:
        unknown.append(f"auto_augment: {THREE_AUGMENT}")
    return unknown + [name for name in ("rotate", "translate", "zoom") if getattr(given, name)]


def timm_loader(folder: Path, data: ClassificationData, given: Augmentation) -> Callable[[], Any]:
    """Makes timm's training loader for the same files and recipe, without the part that runs on the device."""
    # timm asks for 0 bits at the largest magnitude, which Pillow 13 refuses
    posterize = auto_augment.posterize
    auto_augment.NAME_TO_OP["PosterizeIncreasing"] = lambda image, bits, **_: posterize(image, max(1, bits))  # type: ignore[no-untyped-call]

    def loader() -> Any:
        return create_loader(
            ImageDataset(str(folder)),  # type: ignore[no-untyped-call]
            input_size=(3, *data.size),
            batch_size=data.batch_size,
            is_training=True,
            scale=given.crop_scale,
            ratio=given.crop_ratio,
            hflip=given.hflip,
            color_jitter=given.color_jitter,
            auto_augment=given.auto_augment,
            interpolation=given.interpolation,
            re_prob=given.random_erasing,
            re_mode="pixel",
            num_workers=0,
            persistent_workers=False,
            device=torch.device("cpu"),
        ).loader

    return loader


def rate(loader: Any, images: int) -> float:
    """Images per CPU second of this thread."""
    count, batches = 0, iter(loader)
    started = time.thread_time()
    for batch in batches:
        count += len(batch["image"] if isinstance(batch, dict) else batch[0])
        if count >= images:
            break
    return count / (time.thread_time() - started)
