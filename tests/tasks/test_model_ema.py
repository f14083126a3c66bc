"""The moving average of the weights: its formula, and the four ways in which others broke theirs."""

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

import linvit
from linvit.tasks import ClassificationTask, DetectionTask, SegmentationTask
from linvit.tasks.model_ema import ModelEma
from tests.second_task.task import InkTask
from tests.training import RandomImages, batches, fit, tiny_task, trainer

DECAY = 0.7
NORMED = {"name": "timm", "model": "resnet10t"}  # has buffers: float statistics and integer counts


class ByHand(Callback):
    """The recursion in float64, one step of it after every optimiser step."""

    def on_fit_start(self, trainer, task):
        self.average = {name: value.double().clone() for name, value in task.network.state_dict().items()}
        self.step = trainer.global_step
        self.updates = 0

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        self.updates += 1
        for name, value in task.network.state_dict().items():
            if value.is_floating_point():
                self.average[name] = DECAY * self.average[name] + (1 - DECAY) * value.double()
            else:
                self.average[name] = value.double().clone()


@pytest.mark.parametrize(
    ("backbone", "accumulate", "precision"),
    [(None, 2, "bf16-mixed"), (NORMED, 1, "32-true")],  # torch's bfloat16 convolutions: NaN now and then
    ids=["deit in bfloat16", "batch norm"],
)
def test_the_formula_holds_for_every_entry_after_every_step(tmp_path, backbone, accumulate, precision):
    hand = ByHand()
    task = tiny_task(ema_decay=DECAY, lr=1e-2, warmup_epochs=0, **({"backbone": backbone} if backbone else {}))
    options = {"callbacks": [hand], "accumulate_grad_batches": accumulate, "precision": precision}
    fit(task, tmp_path, 32, **options)
    kept = task.ema.network.state_dict()
    assert kept.keys() == hand.average.keys()
    for name, value in kept.items():
        assert torch.allclose(value.double(), hand.average[name], rtol=1e-5, atol=1e-6), name
    assert hand.updates == task.ema.updates == 4 // accumulate
    head = "head.weight" if backbone is None else "fc.weight"
    assert not torch.allclose(kept[head], task.network.state_dict()[head], atol=1e-4)


def test_a_redrawn_projection_is_copied_and_stays_orthogonal():
    """An average of Performer's random matrices is none: its rows are shorter, and no longer orthogonal."""
    torch.manual_seed(0)
    performer = linvit.create_attention(
        {"name": "performer", "nb_features": 8, "redraw_interval": 1, "ortho_scaling": 1, "seed": 3},
        dim=8,
        num_heads=1,
        grid=linvit.Grid((2, 2)),
    ).train()
    performer.weight = nn.Parameter(torch.ones(1))
    average = ModelEma(performer, 0.9)
    for _ in range(5):
        q, k, v = torch.randn(3, 1, 1, 4, 8)
        performer(q, k, v, linvit.Grid((2, 2)))
        average.update(performer)
    rows = average.network.projection_matrix
    assert torch.equal(rows, performer.projection_matrix)
    assert torch.allclose(rows @ rows.mT, 8 * torch.eye(8), atol=1e-4)
    assert average.network.passes.item() == 5


def test_running_statistics_are_averaged_and_other_buffers_copied():
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    network.register_buffer("table", torch.zeros(3))
    average = ModelEma(network, 0.9)
    network.table.fill_(1.0)
    network[0].running_var.fill_(2.0)
    average.update(network)
    assert average.network.table.tolist() == [1.0] * 3
    assert average.network[0].running_var.tolist() == pytest.approx([1.1] * 2)


def test_a_task_with_an_average_can_be_copied(tmp_path):
    task = tiny_task(ema_decay=DECAY, lr=1e-2, warmup_epochs=0)
    fit(task, tmp_path)
    other = pickle.loads(pickle.dumps(task))
    assert other.ema.updates == task.ema.updates == 2
    other.ema.update(other.network)
    task.ema.update(task.network)
    pairs = zip(other.state_dict().values(), task.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


class Logged(Callback):
    """What each validation logged, the sanity check's included."""

    def __init__(self):
        self.checks, self.epochs = [], []

    def on_validation_end(self, trainer, task):
        found = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        (self.checks if trainer.sanity_checking else self.epochs).append(found)


def test_both_are_scored_by_their_own_weights(tmp_path):
    logged, task = Logged(), tiny_task(ema_decay=DECAY, lr=1e-2, warmup_epochs=0)
    trainer(tmp_path, max_epochs=3, callbacks=[logged]).fit(task, batches(24), batches(24))
    data, found = RandomImages(24), logged.epochs[-1]
    for network, prefix in ((task, "val/"), (task.ema, "val/ema_")):
        with torch.no_grad():
            logits = network.eval()(data.images)
        assert found[f"{prefix}loss"] == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-5)
        top1 = (logits.argmax(-1) == data.labels).float().mean().item()
        assert found[f"{prefix}top1"] == found[f"{prefix}score"] == pytest.approx(top1)
    assert abs(found["val/loss"] - found["val/ema_loss"]) > 1e-3, "this shows nothing"


class TestNeverUpdated:
    """Failure 1: weights that were never updated are validated, and count as a score."""

    def test_not_in_the_sanity_check_of_a_new_run(self, tmp_path):
        logged = Logged()
        runner = trainer(tmp_path, max_epochs=1, callbacks=[logged], num_sanity_val_steps=2)
        runner.fit(tiny_task(ema_decay=DECAY), batches(16), batches(16))
        assert len(logged.checks) == 1
        assert not [name for name in logged.checks[0] if "ema" in name]
        assert "val/ema_score" in logged.epochs[0]

    def test_not_in_an_untrained_model(self, tmp_path):
        (found,) = trainer(tmp_path).test(tiny_task(ema_decay=DECAY), batches(16), verbose=False)
        assert not [name for name in found if "ema" in name]


class TestResume:
    """Failures 2 and 3: the average of a resumed run starts anew, or it and the weights are mixed up."""

    @pytest.fixture
    def stopped(self, tmp_path):
        """A run of four epochs that was stopped after two."""

        class Stop(Callback):
            def on_train_epoch_end(self, trainer, task):
                trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

        task = tiny_task(ema_decay=DECAY, lr=1e-2, warmup_epochs=0)
        logged = Logged()
        trainer(tmp_path, max_epochs=4, callbacks=[logged, Stop()]).fit(task, batches(24), batches(24))
        return task, logged, tmp_path / "1.ckpt"

    def test_it_is_the_run_that_was_not_stopped(self, stopped, tmp_path):
        whole, logged, checkpoint = stopped
        task = tiny_task(ema_decay=DECAY, lr=1e-2, warmup_epochs=0)
        again = Logged()
        runner = trainer(tmp_path, max_epochs=4, callbacks=[again], num_sanity_val_steps=-1)
        runner.fit(task, batches(24), batches(24), ckpt_path=checkpoint, weights_only=True)
        for name, value in whole.state_dict().items():
            assert torch.equal(task.state_dict()[name], value), name
        assert task.ema.updates == whole.ema.updates == 12
        assert again.epochs == logged.epochs[2:]
        assert again.checks == [logged.epochs[1]]  # what was loaded is what was scored

    def test_both_are_scored_from_a_checkpoint(self, stopped, tmp_path):
        _, logged, checkpoint = stopped
        task = tiny_task(ema_decay=DECAY)
        (found,) = trainer(tmp_path).test(task, batches(24), ckpt_path=checkpoint, weights_only=True, verbose=False)
        assert {name.partition("/")[2]: value for name, value in found.items()} == pytest.approx(
            {name.partition("/")[2]: value for name, value in logged.epochs[1].items()}
        )

    def test_predictions_come_from_the_weights_that_are_asked_for(self, stopped, tmp_path):
        task = ClassificationTask.load_from_checkpoint(stopped[2], weights_only=True, predict_with="ema")
        twin = ClassificationTask.load_from_checkpoint(stopped[2], weights_only=True)
        for one, network in ((task, twin.ema.network), (twin, twin.network)):
            found = torch.cat([part["probability"] for part in trainer(tmp_path).predict(one, batches(24))])
            with torch.no_grad():
                images = torch.cat([batch["image"] for batch in batches(24)])
                assert torch.allclose(found, network.eval()(images).softmax(-1).amax(-1), atol=1e-6)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_that_is_none(decay):
    with pytest.raises(linvit.UserError, match="ema_decay must be a number at least 0 and below 1"):
        tiny_task(ema_decay=decay)


def other_average(task):
    """A task whose moving average differs from its weights, as after an update."""
    for parameter in task.ema.network.parameters():
        parameter.data.mul_(-0.5).add_(0.1)
    task.ema.updates = 1
    return task


@pytest.mark.parametrize("kind", [ClassificationTask, SegmentationTask, DetectionTask, InkTask])
def test_forward_takes_the_weights_that_predict(kind):
    """Of every task, in evaluation mode alone: in training mode it takes those that are trained."""
    options = {"backbone": {"name": "swin_tiny", "embed_dim": 12, "depths": [1, 1, 1, 1]}, "img_size": 64}
    if kind is SegmentationTask:
        options["head"] = {"name": "semantic_fpn", "width": 8}
    task = other_average(kind(num_classes=3, ema_decay=0.9, predict_with="ema", **options))
    calls = []
    for name, network in (("raw", task.network), ("ema", task.ema.network)):
        network.register_forward_hook(lambda *_, name=name: calls.append(name))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        task.eval()(images)
        task.hparams["predict_with"] = "raw"
        task.eval()(images)
        task.hparams["predict_with"], task.ema.updates = "ema", 0
        task.eval()(images)
    assert calls == ["ema", "raw", "raw"]
    task.ema.updates = 1
    if kind is not DetectionTask:  # which learns from targets
        task.train()(images)
        assert calls == ["ema", "raw", "raw", "raw"]


def test_predicting_with_an_average_that_there_is_not():
    with pytest.raises(linvit.UserError, match="has no moving average"):
        tiny_task(predict_with="ema")
    with pytest.raises(linvit.UserError, match="predict_with must be one of raw, ema; got 'eam'"):
        tiny_task(predict_with="eam", ema_decay=0.9)


def test_half_precision_weights_are_refused(tmp_path):
    with pytest.raises(linvit.UserError, match="whole weights in float32"):
        fit(tiny_task(ema_decay=DECAY), tmp_path, precision="bf16-true")


class TestMesa:
    """The loss with the average's predictions, from a quarter of the steps on."""

    OPTIONS: ClassVar = {"ema_decay": DECAY, "mesa": 0.7, "lr": 1e-2, "warmup_epochs": 0}

    def test_loss_is_that_of_the_labels_and_of_the_average(self, tmp_path):
        task, found = tiny_task(**self.OPTIONS), []
        own = task.training_loss

        def recorded(batch):
            with torch.no_grad():
                logits, averaged = task.network(batch["image"]), copy.deepcopy(task.ema.network).eval()(batch["image"])
                labels = F.cross_entropy(logits, batch["label"], label_smoothing=task.label_smoothing)
                second = -(averaged.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
            loss = own(batch)
            found.append((loss.item(), labels.item(), (labels + 0.7 * second).item(), task.ema.network.training))
            return loss

        task.training_loss = recorded
        trainer(tmp_path, max_epochs=4).fit(task, batches(24))  # 12 steps
        losses, plain, with_average, in_training = zip(*found, strict=True)
        assert losses[:3] == pytest.approx(plain[:3], rel=1e-5)
        assert losses[3:] == pytest.approx(with_average[3:], rel=1e-5)
        assert not any(in_training[3:])

    def test_a_resumed_run_is_the_run_that_was_not_stopped(self, tmp_path):
        class Stop(Callback):
            def on_train_epoch_end(self, trainer, task):
                trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

        whole, task = tiny_task(**self.OPTIONS), tiny_task(**self.OPTIONS)
        trainer(tmp_path, max_epochs=4, callbacks=[Stop()]).fit(whole, batches(24))
        for epoch in (0, 1):  # before the second term, and with it
            trainer(tmp_path, max_epochs=4).fit(
                task, batches(24), ckpt_path=tmp_path / f"{epoch}.ckpt", weights_only=True
            )
            assert all(torch.equal(task.state_dict()[name], value) for name, value in whole.state_dict().items())

    def test_without_an_average_it_is_refused(self):
        with pytest.raises(linvit.UserError, match=r"mesa=0.7 compares with .*: set --model.ema_decay=0.9999"):
            tiny_task(mesa=0.7)
        with pytest.raises(linvit.UserError, match="mesa must be a number at least 0"):
            tiny_task(mesa=-1, ema_decay=0.9)
