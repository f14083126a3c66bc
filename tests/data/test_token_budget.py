"""Batches by tokens: images keep their size, from the files to the loss, to predictions, and through a resume."""

import gc
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import linvit
from linvit import UserError
from linvit.cli.evaluate import read_sets
from linvit.data import ClassificationData
from linvit.data.transforms.classification import Augmentation, NativeSize
from linvit.inference.model import TrainedModel
from linvit.inference.preprocessing import Preprocessing
from linvit.tasks import ClassificationTask
from tests.resuming import differences, ranks, read, run
from tests.training import trainer

BACKBONE = {"name": "deit_tiny", "depth": 1, "embed_dim": 24, "patch_size": 4}
NATIVE = {"token_budget": 60, "patch_size": 4, "num_workers": 0, "seed": 5}
STILL = Augmentation(crop_scale=None, hflip=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of ten classes and many sizes: 60 to train, 20 to validate."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 20)):
        for i in range(count):
            height, width = rng.integers(5, 30, 2)
            file = root / split / str(i % 10) / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file)
    return root


def data(folder: Path, **options: Any) -> ClassificationData:
    return ClassificationData(str(folder), **{**NATIVE, **options})


def task(**options: Any) -> ClassificationTask:
    torch.manual_seed(0)
    return ClassificationTask(backbone=BACKBONE, num_classes=10, img_size=16, **options)


@pytest.mark.parametrize(
    ("size", "options", "want"),
    [
        ((33, 17), (4,), (32, 16)),
        ((1, 1), (16,), (16, 16)),
        ((640, 480), (16, 256), (288, 208)),
        ((480, 640), (16, 256), (208, 288)),
        ((16, 3200), (16, 10), (16, 160)),
    ],
)
def test_native_sizes(size: tuple[int, int], options: tuple[int, ...], want: tuple[int, int]) -> None:
    assert NativeSize(*options)(*size) == want


def test_images_keep_their_size_and_fill_the_budget(folder: Path) -> None:
    module = data(folder, augmentation=STILL)
    module.setup("fit")
    sizes = {f"{path}": Image.open(path).size[::-1] for path in folder.rglob("*.png")}
    for loader in (module.train_dataloader(), module.val_dataloader()):
        for batch in loader:
            assert sum(image.shape[-2] * image.shape[-1] for image in batch["image"]) <= 16 * 60
            for name, image in zip(batch["id"], batch["image"], strict=True):
                assert tuple(image.shape[1:]) == NativeSize(4)(*sizes[name])


def test_all_augmentation_works_on_images_of_any_size(folder: Path) -> None:
    for on in ("worker", "device"):
        given = Augmentation(auto_augment="rand-m9-mstd0.5-inc1", augment_on=on, random_erasing=1, rotate=9, zoom=0.1)
        module = data(folder, augmentation=given)
        module.setup("fit")
        batch = next(iter(module.train_dataloader()))
        module.finish(batch)
        assert all(image.isfinite().all() and not image.shape[1] % 4 for image in batch["image"])


def test_the_loss_weighs_every_image_alike(folder: Path) -> None:
    """The losses of an epoch's batches sum to that of all images one by one, over the mean number in a batch."""
    module, network = data(folder, augmentation=STILL), task(label_smoothing=0.0).double().eval()
    module.setup("fit")
    found, alone = [], []
    for batch in module.train_dataloader():
        module.finish(batch)
        batch["image"] = [image.double() for image in batch["image"]]
        found.append(float(network.training_loss(batch)))
        for image, label in zip(batch["image"], batch["label"], strict=True):
            alone.append(float(network.training_loss({"image": image[None], "label": label[None]})))
    assert np.mean(found) == pytest.approx(np.mean(alone), rel=1e-9)


def test_a_run_trains_tests_and_predicts_a_list_of_images(folder: Path, tmp_path: Path) -> None:
    module, runner = data(folder), trainer(tmp_path, max_epochs=1, limit_train_batches=2, enable_checkpointing=False)
    model = task(attention="focused", ema_decay=0.9, mesa=1.0)
    runner.fit(model, datamodule=module)
    runner.test(model, datamodule=module, verbose=False)
    assert np.isfinite(runner.callback_metrics["test/loss"])
    predicted = runner.predict(model, datamodule=module)
    assert sum(len(batch["class"]) for batch in predicted) == 20
    assert module.preprocessing is not None
    prepared = Preprocessing.of(module.preprocessing)
    image = Image.new("RGB", (37, 22))
    assert tuple(prepared.sample(image, "one")["image"].shape) == (3, 24, 36)


def test_a_loaded_network_predicts_images_of_any_size_in_one_call() -> None:
    prepared = Preprocessing.of({"patch_size": 4, "max_tokens": 60, "mean": [0.5] * 3, "std": [0.2] * 3})
    about: Any = SimpleNamespace(class_names=[*"0123456789"], category_ids=None)
    model = TrainedModel(task(attention="linear").eval(), about, prepared)
    images = [Image.effect_noise(size, 60).convert("RGB") for size in [(37, 22), (9, 50), (200, 100), (37, 22)]]
    for together, alone in zip(model(images), map(model, images), strict=True):
        assert together.scores == pytest.approx(alone.scores, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeated_aug": 3}, "leave --data.repeated_aug out"),
        ({"token_budget": None, "max_tokens": 9}, "max_tokens=9 is for --data.token_budget"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        data(folder, **options)


def test_evaluate_refuses_a_network_of_native_sizes_also_on_the_runs_own_images() -> None:
    model: Any = SimpleNamespace(preprocessing=Preprocessing.of({"patch_size": 4, "mean": [0.5] * 3, "std": [0.2] * 3}))
    with pytest.raises(UserError, match="score it with linvit test"):
        read_sets(model, {}, "timm:any")


def test_another_patch_than_the_networks_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"patches of 4 pixels; set --data.patch_size=4"):
        trainer(tmp_path).fit(task(), datamodule=data(folder, patch_size=8))


@pytest.mark.parametrize("option", ["mixup_alpha", "cutmix_alpha"])
def test_mixing_images_of_several_sizes_is_refused_before_the_sizes_are_read(
    folder: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = data(folder)
    monkeypatch.setattr(module, "_lengths", lambda samples: pytest.fail("sizes were read"))
    with pytest.raises(UserError, match=r"mixup and CutMix mix images of one size"):
        trainer(tmp_path, max_epochs=1).fit(task(**{option: 0.8}), datamodule=module)


def test_a_student_of_such_a_run_learns_from_images_of_one_size(folder: Path, tmp_path: Path) -> None:
    student = task(attention="linear")
    student.teacher = student.network
    with pytest.raises(UserError, match=r"set --data.token_budget=null --data.max_tokens=null"):
        trainer(tmp_path).fit(student, datamodule=data(folder, max_tokens=40))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_run_is_bit_equal(folder: Path, tmp_path: Path, workers: int) -> None:
    loading = {"source": str(folder), **NATIVE, "num_workers": workers}
    options = {"model": {"drop_path_rate": 0.3, "ema_decay": 0.9, "attention": "focused"}, "limit_val_batches": 2}
    whole = run(tmp_path / "whole", [], loading, **options)
    assert differences(run(tmp_path / "parts", [2, 5, 10], loading, **options), whole) == []


def test_two_ranks_share_every_image_balanced_by_tokens_and_resume_bit_equal(folder: Path, tmp_path: Path) -> None:
    loading = {"source": str(folder), **NATIVE}
    options = {"model": {"drop_path_rate": 0.3, "attention": "focused"}, "limit_train_batches": 1.0, "max_epochs": 1}
    found = []
    for name, stops in (("whole", [100]), ("parts", [3, 100])):
        last, target = None, tmp_path / name
        target.mkdir()
        for number, step in enumerate(stops):
            last = ranks(target, 2, step, number, loading, last, **options)
        found.append(read(target, last))
    assert differences(found[1], found[0]) == []
    shares = [[line[2] for line in found[0][f"samples-{rank}"]] for rank in range(2)]
    assert sorted(row for share in shares for rows in share for row in rows) == [*range(60)]
    module = data(folder)
    module.setup("fit")
    lengths, _ = module._lengths(module.train_set)
    steps = [[lengths[rows].sum() for rows in step] for step in zip(*shares, strict=True)]
    assert np.median([abs(one - other) for one, other in steps]) <= 2


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_steps_of_random_sizes() -> None:
    network = linvit.create_backbone({**BACKBONE, "attention": "focused"}, num_classes=10, img_size=16)
    rng = np.random.default_rng(0)

    def steps(count: int) -> int:
        for _ in range(count):
            images: list[Tensor] = [torch.randn(3, *(4 * rng.integers(1, 17, 2)).tolist()) for _ in range(4)]
            network(images).square().sum().backward()
            network.zero_grad()
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = steps(200)
    assert steps(800) < before + 32 * 1024  # KiB; a kept table of each size alone would be 256 x 25 KiB
