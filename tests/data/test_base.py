"""What every image data module shares: loaders, preview, the checks of its arguments."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

import linvit
from linvit.data import ClassificationData
from linvit.data.sources.splits import load_splits
from linvit.data.transforms.classification import Augmentation
from tests.data.images import image_folder
from tests.training import tiny_task, trainer


def data(**options):
    return ClassificationData(**{"num_workers": 0, "img_size": 8, "mean": [0, 0, 0], "std": [1, 1, 1], **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), ["train", "val", "test"], count=5)  # 10 per split


def ready(folder, stage="fit", **options):
    module = data(source=str(folder), **options)
    module.setup(stage)
    return module


@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 4]), (16, [10])])
def test_training_drops_the_last_incomplete_batch_unless_it_is_the_only_one(folder, batch_size, sizes):
    loader = ready(folder, batch_size=batch_size).train_dataloader()
    assert [len(batch["index"]) for batch in loader] == sizes


def test_training_is_shuffled_anew_every_epoch(folder):
    loader = ready(folder, batch_size=10).train_dataloader()
    (first,) = [batch["index"].tolist() for batch in loader]
    loader.sampler.set_epoch(1)  # as Lightning does
    (second,) = [batch["index"].tolist() for batch in loader]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_evaluation_sees_every_image_once_in_order(folder, stage):
    module = ready(folder, {"val": "validate"}.get(stage, stage), batch_size=4)
    batches = list(getattr(module, f"{stage}_dataloader")())
    assert [len(batch["index"]) for batch in batches] == [4, 4, 2]
    assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(10))
    assert all(("label" in batch) == (stage != "predict") for batch in batches)


def test_a_sharded_model_needs_as_many_batches_on_every_device(folder, tmp_path):
    module = ready(folder, "validate", batch_size=4)  # 10 images
    sharded = SimpleNamespace(strategy=FSDPStrategy(), world_size=2, global_rank=0)
    module.trainer = sharded
    module.val_dataloader()  # 5 and 5
    sharded.world_size, module.batch_size = 3, 3
    with pytest.raises(linvit.UserError, match="of 3 devices some would evaluate a batch more"):  # 4, 3 and 3
        module.val_dataloader()
    load_splits(str(folder))["val"].to_parquet(tmp_path / "val-00000.parquet")
    stream = ready(tmp_path, "validate", batch_size=4, streaming=True, num_classes=2)
    stream.trainer = sharded
    with pytest.raises(linvit.UserError, match="which a stream does not say"):
        stream.val_dataloader()
    sharded.strategy = DDPStrategy()
    for each in (module, stream):
        each.val_dataloader()


class TestDeterminism:
    """Training batches as a function of (seed, epoch), to the last bit."""

    AUGMENTATION = Augmentation(auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.5, interpolation="random")

    def batches(self, folder, epoch=0, noise=0, **options):
        """What the model sees of an epoch, while other things use the global generators."""
        module = ready(folder, batch_size=4, augmentation=self.AUGMENTATION, **options)
        loader = module.train_dataloader()
        loader.sampler.set_epoch(epoch)
        torch.manual_seed(noise)
        np.random.seed(noise)
        random.seed(noise)
        return [module.on_after_batch_transfer(batch, 0) for batch in loader]

    def same(self, first, second):
        return all(
            torch.equal(one["image"], other["image"])
            and torch.equal(one["index"], other["index"])
            and torch.equal(one["label"], other["label"])
            and one["seed"] == other["seed"]
            for one, other in zip(first, second, strict=True)
        )

    @pytest.mark.parametrize("on", ["worker", "device"])
    def test_workers_and_global_generators_change_nothing(self, folder, on, monkeypatch):
        monkeypatch.setattr(self.__class__, "AUGMENTATION", replace(self.AUGMENTATION, augment_on=on))
        alone = self.batches(folder)
        assert self.same(alone, self.batches(folder, noise=1, num_workers=3))

    def test_no_global_generator_is_drawn_from(self, folder):
        """Else the number of loader processes would change dropout, and with it what is learnt."""
        module = ready(folder, batch_size=4, augmentation=self.AUGMENTATION)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        for batch in [*module.train_dataloader(), *module.val_dataloader()]:
            module.on_after_batch_transfer(batch, 0)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]

    def test_epochs_and_seeds_change_everything(self, folder):
        first = self.batches(folder)
        for other in (self.batches(folder, epoch=1), self.batches(folder, seed=1)):
            assert not any(torch.equal(one["image"], two["image"]) for one, two in zip(first, other, strict=True))
            assert {batch["seed"] for batch in first}.isdisjoint(batch["seed"] for batch in other)

    def test_the_seed_is_the_run_s_unless_given(self, folder, monkeypatch):
        monkeypatch.setenv("PL_GLOBAL_SEED", "5")
        assert self.same(self.batches(folder), self.batches(folder, seed=5))
        assert not self.same(self.batches(folder), self.batches(folder, seed=0))
        monkeypatch.delenv("PL_GLOBAL_SEED")
        assert self.same(self.batches(folder), self.batches(folder, seed=0))

    def test_repeated_augmentation_reaches_the_sampler(self, folder):
        (batch,) = ready(folder, batch_size=10, repeated_aug=2).train_dataloader()
        assert len(batch["index"]) == 10
        assert len(batch["index"].unique()) == 5


class TestOnTheDevice:
    """What becomes of a batch after it was moved."""

    def test_workers_hand_over_8_bits_and_the_model_gets_normalised_floats(self, folder):
        module = ready(folder, "validate", batch_size=4, mean=[0.2, 0.3, 0.4], std=[0.5, 0.6, 0.7])
        batch = next(iter(module.val_dataloader()))
        pixels = batch["image"]
        assert pixels.dtype == torch.uint8
        by_hand = (pixels / 255 - torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(
            3, 1, 1
        )
        done = module.on_after_batch_transfer(batch, 0)
        assert set(done) == {"image", "label", "index", "id"}
        assert done["image"].dtype == torch.float32
        assert torch.allclose(done["image"], by_hand, atol=1e-6)

    def test_the_batch_s_seed_is_an_int(self, folder):
        """A tensor would be moved to the device, and reading it there would wait for the device."""
        module = ready(folder, batch_size=4)
        batch = module.on_after_batch_transfer(next(iter(module.train_dataloader())), 0)
        assert isinstance(batch["seed"], int)
        assert "device_ops" not in batch

    def test_training_images_are_erased_after_normalising(self, folder):
        module = ready(folder, batch_size=10, img_size=32, augmentation=Augmentation(None, hflip=0, random_erasing=1.0))
        (batch,) = module.train_dataloader()
        plain = batch["image"] / 255
        boxes = [ops.erase for ops in batch["device_ops"].samples]
        done = module.on_after_batch_transfer(batch, 0)["image"]
        for image, before, box in zip(done, plain, boxes, strict=True):
            changed = (image - before).abs() > 1e-6
            assert changed.sum() == 3 * box.height * box.width
            assert changed[:, box.top : box.top + box.height, box.left : box.left + box.width].all()

    def test_images_can_be_erased_after_mixing(self, folder):
        """The batch brings what erases; done to the images as they are it comes to the same as erasing at once."""
        at_once, later = (Augmentation(None, random_erasing=1.0, erase_after_mixing=after) for after in (False, True))
        modules = [ready(folder, batch_size=10, img_size=32, augmentation=given) for given in (at_once, later)]
        now, then = (module.on_after_batch_transfer(next(iter(module.train_dataloader())), 0) for module in modules)
        assert "after_mixing" not in now
        assert not torch.equal(now["image"], then["image"])
        assert torch.equal(now["image"], then["after_mixing"](then["image"].clone()))
        assert all(torch.equal(*pair) for pair in zip(*(module.preview(4).values() for module in modules), strict=True))

    def test_a_model_of_half_precision_gets_half(self, folder, tmp_path):
        seen = []

        class Watch(Callback):
            def on_train_batch_start(self, runner, task, batch, batch_idx):
                seen.append(batch["image"].dtype)

        module = data(source=str(folder), batch_size=5, img_size=16)
        runner = trainer(tmp_path, max_epochs=1, precision="bf16-true", callbacks=[Watch()], limit_val_batches=0)
        runner.fit(tiny_task(num_classes=2), module)
        assert seen == [torch.bfloat16] * 2

    def test_lightning_tells_the_epoch(self, folder, tmp_path):
        epochs = []

        class Watch(Callback):
            def on_train_epoch_start(self, runner, task):
                epochs.append(runner.train_dataloader.sampler.epoch)

        module = data(source=str(folder), batch_size=5, img_size=16)
        trainer(tmp_path, max_epochs=3, callbacks=[Watch()]).fit(tiny_task(num_classes=2), module)
        assert epochs == [0, 1, 2]


class TestPreview:
    """What the image grid shows."""

    def test_images_are_spread_over_the_set_as_the_model_sees_them(self, folder):
        none = Augmentation(crop_scale=None, hflip=0)
        module = ready(folder, mean=[0.5] * 3, std=[0.2] * 3, augmentation=none)
        shown = module.preview(5)
        assert {name: images.shape for name, images in shown.items()} == {"train": (5, 3, 8, 8), "val": (5, 3, 8, 8)}
        for name, samples in (("train", module.train_set), ("val", module.val_set)):
            expected = torch.stack([samples[index]["image"] for index in (0, 2, 4, 6, 8)]) / 255
            assert torch.allclose(shown[name], expected, atol=1e-6)

    @pytest.mark.parametrize("on", ["worker", "device"])
    def test_all_augmentation_shows_and_each_time_the_same(self, folder, on):
        strong = Augmentation(None, hflip=0, auto_augment="rand-p1", augment_on=on, random_erasing=1.0)
        plain, first, second = (
            ready(folder, img_size=32, augmentation=augmentation).preview(10)["train"]
            for augmentation in (Augmentation(None, hflip=0), strong, strong)
        )
        assert torch.equal(first, second)
        assert not any(torch.equal(*pair) for pair in zip(plain, first, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number at least 1; got 0"),
        ({"num_workers": -1}, "-1"),
        ({"mean": [0.5]}, "mean and std need 3 values, one per channel, std above 0; got [0.5], [1, 1, 1]"),
        ({"std": [1, 0, 1]}, "[1, 0, 1]"),
        ({"img_size": 0}, "0"),
        ({"img_size": [8]}, "[8]"),
        ({"crop_pct": 0.0}, "crop_pct must be a number above 0 and at most 1; got 0.0"),
        ({"crop_mode": "long"}, "crop_mode must be one of center, squash; got 'long'"),
        ({"repeated_aug": 0}, "repeated_aug must be a whole number at least 1 (1 uses each image once); got 0"),
        ({"seed": -1}, "seed must be a whole number at least 0, or null for the run's; got -1"),
        ({"val_fraction": 0.0}, "val_fraction must be a number above 0 and below 1; got 0.0"),
        ({"max_pixels": 10**9}, "where PIL refuses; got 1000000000"),
    ],
    ids=str,
)
def test_mistakes_are_user_errors(options, message):
    with pytest.raises(linvit.UserError) as error:
        data(**options)
    assert message in str(error.value)
