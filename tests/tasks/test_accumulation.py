"""The gradient of an optimiser step is the mean over the batches of that step, also at the end of an epoch."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from linvit import UserError
from tests.training import RandomImages, batch, batches, tiny_task, trainer


class Stream(IterableDataset):
    """Images whose number nobody knows before the end."""

    def __init__(self, count):
        self.images = RandomImages(count)

    def __iter__(self):
        return (self.images[row] for row in range(len(self.images)))


def stream(count):
    return DataLoader(Stream(count), 8, collate_fn=batch)


class Watch(Callback):
    """Keeps what a step is made of, and its gradient."""

    def __init__(self):
        self.steps, self.own = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.own.append((copy.deepcopy(pl_module.network).train(), batch))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps.append((self.own, gradient(pl_module.network)))
        self.own = []


def gradient(network):
    return torch.cat([weight.grad.flatten() for weight in network.parameters()]).clone()


def mean_gradient(own):
    """The mean over batches, without Lightning."""
    network = own[0][0]
    network.zero_grad()
    losses = [F.cross_entropy(network(one["image"]), one["label"]) for _, one in own]
    torch.stack(losses).mean().backward()
    return gradient(network)


@pytest.mark.parametrize(
    ("streamed", "window", "options", "sizes"),
    [
        (False, 4, {"max_epochs": 2}, [4, 1, 4, 1]),
        (False, 2, {"limit_train_batches": 3}, [2, 1]),
        (False, 2, {"max_steps": 2, "max_epochs": -1}, [2, 2]),
        (True, 3, {}, [3, 2]),
    ],
    ids=str,
)
def test_it_is_the_mean_over_its_own_batches(tmp_path, streamed, window, options, sizes):
    task, watch = tiny_task(label_smoothing=0.0, warmup_steps=0, schedule="cosine"), Watch()
    steps = {"max_steps": 2} if streamed else {}
    running = {"max_epochs": 1, "accumulate_grad_batches": window, "callbacks": [watch], **steps, **options}
    trainer(tmp_path, **running).fit(task, (stream if streamed else batches)(40))
    assert [len(own) for own, _ in watch.steps] == sizes
    for own, found in watch.steps:
        torch.testing.assert_close(found, mean_gradient(own), rtol=1e-4, atol=1e-6)


class SaveOnce(Callback):
    """Saves within an accumulation."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


def test_after_a_resume_within_an_accumulation_it_is_the_mean_over_the_rest(tmp_path):
    """The gradients of before are not saved."""
    path, options = tmp_path / "within.ckpt", {"max_epochs": 1, "accumulate_grad_batches": 4}
    with pytest.warns(UserWarning, match="written within the accumulation of 4 batches"):
        trainer(tmp_path, **options, callbacks=[SaveOnce(path)]).fit(tiny_task(warmup_steps=0), batches(64))
    task, watch = tiny_task(label_smoothing=0.0, warmup_steps=0), Watch()
    trainer(tmp_path, **options, callbacks=[watch]).fit(task, batches(64), ckpt_path=path)
    assert [len(own) for own, _ in watch.steps] == [1, 4]
    for own, found in watch.steps:
        torch.testing.assert_close(found, mean_gradient(own), rtol=1e-4, atol=1e-6)


def test_a_window_that_changes_between_epochs_is_refused(tmp_path):
    """The schedule would count the steps of the first."""
    runner = trainer(tmp_path, max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
    with pytest.raises(UserError, match="GradientAccumulationScheduler"):
        runner.fit(tiny_task(), batches(16))
