"""Time and memory of callables: the rounds with a clock that works turn, the memory against what is known."""

import itertools
import time

import pytest
import torch

from linvit.experiments.measure import Estimate, Timing, interleaved, out_of_memory, peak_memory, processor_share

KIB = 1024


class Clock:
    """Seconds that only work lets pass."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def work(self, name, *durations):
        """A callable that takes each of the durations in turn, the last one from then on."""
        durations = list(durations)

        def run():
            self.order.append(name)
            self.now += durations.pop(0) if len(durations) > 1 else durations[0]

        return run


def test_callables_take_turns_and_a_disturbed_round_does_not_move_the_median():
    clock = Clock()
    works = {"a": clock.work("a", 9, 1, 1, 50, 1), "b": clock.work("b", 9, 2, 2, 60, 2)}
    found = interleaved(works, budget=150, clock=clock)
    assert clock.order[:8] == ["a", "b", "a", "b", "b", "a", "a", "b"]  # a call each to warm up, then turns
    assert found["a"].median == 1
    assert found["b"].median == 2
    assert max(found["a"].samples) == 50


def test_ratios_are_of_samples_of_one_round():
    assert Timing((2.0, 20.0, 2.0, 2.0)).over(Timing((1.0, 10.0, 1.0))).median == 2


@pytest.mark.parametrize(("samples", "beyond"), [(6, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median_leaves_out_as_many_ranks_as_the_table_of_the_sign_test(samples, beyond):
    assert Estimate.of(range(samples)) == ((samples - 1) / 2, beyond, samples - 1 - beyond, samples)


def test_each_has_its_share_of_the_budget_and_three_samples_at_least():
    clock = Clock()
    found = interleaved({"fast": clock.work("f", 1), "slow": clock.work("s", 30)}, budget=40, clock=clock)
    assert len(found["fast"].samples) == 20
    assert len(found["slow"].samples) == 3


def test_short_calls_are_repeated_within_a_sample():
    clock = Clock()
    found = interleaved({"short": clock.work("s", 1e-3)}, budget=8e-3, clock=clock)
    assert found["short"].samples == pytest.approx([1e-3] * 4)
    assert len(clock.order) == 2 + 4 * 2


def test_an_interruption_loses_no_sample_and_the_time_left_falls():
    clock, times, left = Clock(), {}, []

    def on_sample(seconds):
        left.append(seconds)
        if len(left) == 5:
            raise KeyboardInterrupt

    works = {name: clock.work(name, 1) for name in "ab"}
    with pytest.raises(KeyboardInterrupt):
        interleaved(works, budget=20, clock=clock, times=times, on_sample=on_sample)
    assert times == {"a": [1, 1, 1], "b": [1, 1]}
    assert left == [19, 18, 17, 16, 15]


def test_peak_memory_counts_what_is_held_at_one_time():
    def work():
        first = torch.zeros(256, 4, KIB)  # 4 MiB of float32
        del first
        second, third = torch.zeros(256, KIB), torch.zeros(512, KIB)  # 1 MiB and 2 MiB
        return second, third

    assert peak_memory(work) == 4 * KIB * KIB
    kept = work()
    assert peak_memory(lambda: kept[0] + kept[0]) == KIB * KIB


def test_peak_memory_sees_the_matrix_of_a_softmax_and_of_its_backward_pass():
    q = torch.randn(1, 1, 512, 16, requires_grad=True)

    def work():
        ((q @ q.mT).softmax(-1) @ q).sum().backward()

    work()
    q.grad = None
    matrix = 512 * 512 * 4
    assert 2 * matrix < peak_memory(work) < 4 * matrix


def test_exceptions_that_say_that_memory_is_used_up():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    assert not out_of_memory(RuntimeError("shapes do not fit"))


@pytest.mark.gpu
def test_peak_memory_on_cuda():
    x = torch.zeros(256, KIB, device="cuda")
    assert peak_memory(lambda: x + x, "cuda") == KIB * KIB


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_share_of_the_processor_is_that_of_all_threads(monkeypatch, share):
    clock = itertools.count()
    now = [0]
    monkeypatch.setattr(time, "perf_counter", lambda: now.append(next(clock)) or now[-1] / 10)
    monkeypatch.setattr(time, "process_time", lambda: share * torch.get_num_threads() * now[-1] / 10)
    assert processor_share(0.5) == pytest.approx(share)
