"""Classification: loss, mixing, metrics and predictions, against computations by hand."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import linvit
from linvit.tasks.classification import Mixup
from tests.training import CLASSES, TINY, RandomImages, batches, fit, tiny_task, trainer


class Watch(Callback):
    """Keeps what training and validation steps were given and what they returned."""

    def __init__(self):
        self.train, self.val, self.losses = [], [], []

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.train.append(batch)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_validation_batch_start(self, trainer, task, batch, batch_idx, dataloader_idx=0):
        self.val.append(batch)


def logits_of(task, data):
    with torch.no_grad():
        return task.eval()(data.images)


@pytest.mark.parametrize(("attention", "precision"), [("focused", "32-true"), ("performer", "bf16-mixed")])
def test_it_trains(tmp_path, attention, precision):
    task = tiny_task(attention=attention, backbone={**TINY, "global_pool": "avg"})  # so that every token matters
    before = [parameter.detach().clone() for parameter in task.parameters()]
    runner = fit(task, tmp_path, precision=precision)
    assert runner.global_step == 2
    assert runner.callback_metrics["train/loss"].isfinite()
    moved = [not torch.equal(old, new) for old, new in zip(before, task.parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_label_smoothing_is_the_formula(tmp_path, smoothing):
    data, watch = RandomImages(8), Watch()
    task = tiny_task(label_smoothing=smoothing)
    log = logits_of(task, data).log_softmax(-1)
    target = (1 - smoothing) * F.one_hot(data.labels, CLASSES) + smoothing / CLASSES
    fit(task, tmp_path, count=8, callbacks=[watch])
    assert watch.losses == pytest.approx([-(target * log).sum(-1).mean().item()], rel=1e-5)


class Seeded(RandomImages):
    """Random images whose batches carry a seed."""

    @staticmethod
    def batches(count, seed=3):
        def collate(samples):
            return {**default_collate(samples), "seed": seed}

        return DataLoader(Seeded(count), 8, collate_fn=collate)


class TestMixing:
    """Mixup and CutMix in the training step; see test_mixing for the formulas."""

    @pytest.mark.parametrize("alphas", [{"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}], ids=str)
    def test_the_loss_is_that_of_the_mixed_batch(self, tmp_path, alphas):
        data, watch, smoothing = RandomImages(8), Watch(), 0.1
        task = tiny_task(label_smoothing=smoothing, **alphas)
        mixing = Mixup(alphas.get("mixup_alpha", 0), alphas.get("cutmix_alpha", 0))
        images, shares = mixing(data.images, data.labels, CLASSES, 3)
        assert not torch.equal(images, data.images)
        target = (1 - smoothing) * shares + smoothing / CLASSES
        with torch.no_grad():
            log = task.eval()(images).log_softmax(-1)
        trainer(tmp_path, max_epochs=1, callbacks=[watch]).fit(task, Seeded.batches(8))
        assert watch.losses == pytest.approx([-(target * log).sum(-1).mean().item()], rel=1e-5)

    @pytest.mark.parametrize("alpha", [0.0, 0.8])
    def test_what_is_to_be_done_after_mixing_is_done_then(self, tmp_path, alpha):
        """Such as random erasing, whether batches are mixed or not."""
        seen = []

        def erase(images):
            seen.append(images)
            return torch.zeros_like(images)

        def collate(samples):
            return {**default_collate(samples), "seed": 3, "after_mixing": erase}

        data, watch = RandomImages(8), Watch()
        task = tiny_task(label_smoothing=0.0, mixup_alpha=alpha)
        images, target = data.images, F.one_hot(data.labels, CLASSES).float()
        if alpha:
            images, target = Mixup(alpha, 0.0)(data.images, data.labels, CLASSES, 3)
        with torch.no_grad():
            log = task.eval()(torch.zeros_like(images)).log_softmax(-1)
        trainer(tmp_path, max_epochs=1, callbacks=[watch]).fit(task, DataLoader(data, 8, collate_fn=collate))
        assert torch.equal(seen[-1], images)
        assert watch.losses == pytest.approx([-(target * log).sum(-1).mean().item()], rel=1e-5)

    def test_batches_without_a_seed_are_a_user_error(self, tmp_path):
        with pytest.raises(linvit.UserError, match=r"batch\['seed'\]"):
            trainer(tmp_path, max_epochs=1).fit(tiny_task(mixup_alpha=1.0), DataLoader(RandomImages(8), 8))

    def test_validation_is_left_alone(self, tmp_path):
        watch, data = Watch(), RandomImages(8)
        runner = trainer(tmp_path, max_epochs=1, callbacks=[watch])
        runner.fit(tiny_task(mixup_alpha=1.0), Seeded.batches(8), batches(8))
        assert torch.equal(watch.val[0]["image"], data.images)
        assert torch.equal(watch.val[0]["label"], data.labels)


class TestMetrics:
    """Loss and accuracies over batches of 8, 8 and 3 images."""

    def test_they_weigh_every_image_alike(self, tmp_path):
        data = RandomImages(19)
        task = tiny_task(label_smoothing=0.5)  # which evaluation does without
        logits = logits_of(task, data)
        ranks = (logits > logits.gather(1, data.labels[:, None])).sum(1)
        (found,) = trainer(tmp_path).test(task, batches(19), verbose=False)
        top1 = (ranks < 1).double().mean().item()
        assert found == pytest.approx(
            {
                "test/loss": F.cross_entropy(logits, data.labels).item(),
                "test/top1": top1,
                "test/top5": (ranks < 5).double().mean().item(),
                "test/score": top1,
            },
            rel=1e-5,
        )

    def test_they_start_anew_every_epoch(self, tmp_path):
        data, scores = RandomImages(19), []

        class Scores(Callback):
            def on_validation_epoch_end(self, trainer, task):
                task.eval()
                right = logits_of(task, data).argmax(-1) == data.labels
                scores.append((right.float().mean().item(), trainer))

            def on_train_epoch_end(self, trainer, task):
                scores[-1] = (scores[-1][0], trainer.callback_metrics["val/score"].item())

        runner = trainer(tmp_path, max_epochs=6, callbacks=[Scores()])
        runner.fit(tiny_task(lr=1e-2, warmup_epochs=0), batches(19), batches(19))
        by_hand, logged = zip(*scores, strict=True)
        assert logged == pytest.approx(by_hand)
        assert len(set(logged)) > 1, "the score never changed, so this shows nothing"

    @pytest.mark.parametrize(("classes", "tops"), [(5, {"top1"}), (6, {"top1", "top5"})])
    def test_top5_needs_more_than_five_classes(self, tmp_path, classes, tops):
        task = tiny_task(num_classes=classes)
        (found,) = trainer(tmp_path).validate(task, batches(8, classes=classes), verbose=False)
        assert set(found) == {"val/loss", "val/score", *(f"val/{top}" for top in tops)}


def test_predictions_are_the_most_probable_class(tmp_path):
    data, task = RandomImages(11), tiny_task()
    probability, index = logits_of(task, data).softmax(-1).max(-1)
    found = trainer(tmp_path).predict(task, batches(11))
    assert torch.equal(torch.cat([part["class"] for part in found]), index)
    assert torch.allclose(torch.cat([part["probability"] for part in found]), probability)
    assert [name for part in found for name in part["id"]] == [f"{i}.png" for i in range(11)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing must be in [0, 1); got 1.0"),
        ({"mixup_alpha": -1.0}, "got -1.0, 0.0"),
        ({"cutmix_alpha": -2.0}, "got 0.0, -2.0"),
    ],
    ids=str,
)
def test_mistakes_are_user_errors(options, message):
    with pytest.raises(linvit.UserError) as error:
        tiny_task(**options)
    assert message in str(error.value)
