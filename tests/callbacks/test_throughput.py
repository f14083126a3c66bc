"""Images per second and waiting, by a clock that the test sets."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from linvit.callbacks import Throughput
from linvit.callbacks import monitors as throughput
from linvit.data.loading import loader
from linvit.data.loading.loader import TrainLoader
from tests.training import Memory, RandomImages, batch, batches, fit, tiny_task, trainer


class Clock(Callback):
    """Advances by three seconds while a batch is awaited, one per step, and an hour per validation."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for measured in (throughput, loader):
            monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def slow(self, count):
        """A loader whose batches take their time."""

        def slowly(samples):
            self.now += 3
            return batch(samples)

        return TrainLoader(RandomImages(count), 8, collate_fn=slowly)

    def on_after_backward(self, *args):
        self.now += 1

    def on_validation_batch_end(self, *args):
        self.now += 3600


class Saving(Callback):
    """Takes six seconds after a step, as a callback that writes checkpoints."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_end(self, *args):  # after the callback under test
        self.clock.now += 6


def logged(folder, clock, callback, *more, steps=4, **options):
    """What is logged of two epochs with so many steps of 8 images."""
    memory = Memory()
    callbacks = [clock, callback, *more]
    runner = trainer(folder, **{"max_epochs": 2, "logger": memory, "callbacks": callbacks, **options})
    runner.fit(tiny_task(), clock.slow(8 * steps), batches(8))
    return memory.values


def test_it_logs_full_windows_and_counts_no_validation(tmp_path, monkeypatch):
    values = logged(tmp_path, Clock(monkeypatch), Throughput(3))
    steps = [2, 3, 6, 7]  # Lightning repeats the last figure of an epoch
    assert values["images/s"] == [(step, pytest.approx(2)) for step in steps]
    assert values["data_wait"] == [(step, pytest.approx(0.75)) for step in steps]


@pytest.mark.parametrize(("steps", "log_every_n_steps"), [(3, 1), (9, 50)])
def test_a_short_epoch_gets_one_figure_at_its_end(tmp_path, monkeypatch, steps, log_every_n_steps):
    options = {"steps": steps, "log_every_n_steps": log_every_n_steps}
    values = logged(tmp_path, Clock(monkeypatch), Throughput(4), **options)
    assert values["images/s"] == [(steps - 1, pytest.approx(2)), (2 * steps - 1, pytest.approx(2))]
    assert values["data_wait"] == [(steps - 1, pytest.approx(0.75)), (2 * steps - 1, pytest.approx(0.75))]


def test_a_validation_amid_an_epoch_does_not_count(tmp_path, monkeypatch):
    values = logged(tmp_path, Clock(monkeypatch), Throughput(2), val_check_interval=1)
    assert {value for _, value in values["images/s"]} == {2}
    assert {value for _, value in values["data_wait"]} == {0.75}


def test_only_the_fetch_of_a_batch_is_waiting_for_data(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    values = logged(tmp_path, clock, Throughput(2), Saving(clock))
    # Two fetches, two steps, and what is written between them.
    assert values["data_wait"][0] == (1, pytest.approx(6 / (6 + 2 + 6)))


def test_a_loader_that_counts_no_seconds_has_no_figure(tmp_path):
    memory = Memory()
    fit(tiny_task(), tmp_path, logger=memory, callbacks=[Throughput(2)])
    assert memory.values.keys() >= {"images/s"}
    assert "data_wait" not in memory.values


def test_a_second_fit_counts_once(tmp_path, monkeypatch):
    clock, callback, memory = Clock(monkeypatch), Throughput(4), Memory()
    runner = trainer(tmp_path, max_epochs=1, logger=memory, callbacks=[clock, callback])
    loaded = clock.slow(32)
    runner.fit(tiny_task(), loaded)
    runner.fit_loop.max_epochs = 2
    runner.fit(tiny_task(), loaded)
    assert memory.values["data_wait"] == [(3, pytest.approx(0.75)), (7, pytest.approx(0.75))]


def test_several_devices_count_together(tmp_path, monkeypatch):
    memory = Memory()
    callback = Throughput(1)
    inner = callback.on_train_batch_end

    def on_two_devices(runner, *args):
        monkeypatch.setattr(type(runner), "world_size", 2)
        inner(runner, *args)
        monkeypatch.undo()

    callback.on_train_batch_end = on_two_devices
    clock = Clock(monkeypatch)
    runner = trainer(tmp_path, max_epochs=1, logger=memory, callbacks=[clock, callback])
    runner.fit(tiny_task(), clock.slow(8))
    assert memory.values["images/s"][0][1] == pytest.approx(4)
