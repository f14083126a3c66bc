"""Images per second and waiting, by a clock that the test sets."""

import time
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from linvit.callbacks import Throughput, throughput
from tests.training import Memory, batches, fit, tiny_task, trainer


class Clock(Callback):
    """Advances by three seconds while a batch is awaited, one per step, and an hour per validation."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def on_train_batch_start(self, *args):  # before the callback under test
        self.now += 3

    def on_after_backward(self, *args):
        self.now += 1

    def on_validation_start(self, *args):
        self.now += 3600


@pytest.mark.parametrize("window", [1, 2, 3])
def test_it_logs_full_windows_and_counts_no_validation(tmp_path, monkeypatch, window):
    memory = Memory()
    callbacks = [Clock(monkeypatch), Throughput(window)]
    runner = trainer(tmp_path, max_epochs=2, logger=memory, callbacks=callbacks)
    runner.fit(tiny_task(), batches(32), batches(8))  # 4 steps of 8 images per epoch
    steps = [step for step in range(8) if step % 4 >= window - 1]  # Lightning repeats the last figure of an epoch
    assert memory.values["images/s"] == [(step, pytest.approx(2)) for step in steps]
    assert memory.values["data_wait"] == [(step, pytest.approx(0.75)) for step in steps]


def test_a_validation_amid_an_epoch_does_not_count(tmp_path, monkeypatch):
    memory = Memory()
    callbacks = [Clock(monkeypatch), Throughput(2)]
    runner = trainer(tmp_path, max_epochs=1, logger=memory, callbacks=callbacks, val_check_interval=1)
    runner.fit(tiny_task(), batches(32), batches(8))
    assert "images/s" not in memory.values  # no window of two steps without a validation
    callbacks[1].window = 1
    runner = trainer(tmp_path, max_epochs=1, logger=memory, callbacks=callbacks, val_check_interval=1)
    runner.fit(tiny_task(), batches(32), batches(8))
    assert {value for _, value in memory.values["images/s"]} == {2}


def test_several_devices_count_together(tmp_path, monkeypatch):
    memory = Memory()
    callback = Throughput(1)
    inner = callback.on_train_batch_end

    def on_two_devices(runner, *args):
        monkeypatch.setattr(type(runner), "world_size", 2)
        inner(runner, *args)
        monkeypatch.undo()

    callback.on_train_batch_end = on_two_devices
    fit(tiny_task(), tmp_path, 8, logger=memory, callbacks=[Clock(monkeypatch), callback])
    assert memory.values["images/s"][0][1] == pytest.approx(4)


def test_the_real_clock_gives_a_sane_rate(tmp_path):
    memory = Memory()
    start = time.perf_counter()
    fit(tiny_task(), tmp_path, 32, logger=memory, callbacks=[Throughput(4)])
    assert memory.values["images/s"][0][1] > 32 / (time.perf_counter() - start)
    assert 0 < memory.values["data_wait"][0][1] < 1
