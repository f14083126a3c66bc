"""The verdict on networks with planted costs and noise; nothing is timed."""

import math
import random

import pytest

from linvit.advice.verdict import ROOM, SIEVE, Measured, Row, decide, state_of
from linvit.experiments.measure import Turns


class Noisy:
    """A clock that works move by their cost times log-normal noise of a turn and of a sample."""

    def __init__(self, seed, together=0.2, alone=0.03):
        self.now, self.random, self.together, self.alone = 0.0, random.Random(seed), together, alone
        self.load = 1.0

    def __call__(self):
        return self.now

    def turn(self):
        self.load = math.exp(self.random.gauss(0, self.together))

    def work(self, cost):
        def run():
            self.now += cost * self.load * math.exp(self.random.gauss(0, self.alone))

        return run


def sampled(clock, costs, turns):
    """Seconds by name, taken by the same `Turns` as those of networks."""
    taken = Turns(clock=clock)
    for name, cost in costs.items():
        taken.add(name, clock.work(cost))
    for _ in range(turns):
        clock.turn()
        for _ in taken.round([*costs]):
            pass
    return taken.times


def ceiling_of(share, clock, side=224, turns=24):
    times = sampled(clock, {"now": 1.0, "ceiling": 1 - share}, turns)
    rows = {kind: Row(kind, kind, seconds=seconds) for kind, seconds in times.items()}
    return Measured((side, side), 1 / (1 - share), ceiling=rows)


def test_twenty_networks_of_1_to_60_percent_attention():
    """The answer is that of the planted share in 19 of 20, by three seeds."""
    for seed in range(3):
        right = 0
        for i in range(20):
            share = 0.01 + 0.59 * i / 19
            answer = decide("planted", [ceiling_of(share, Noisy(100 * seed + i))]).answer
            right += answer == ("room" if 1 / (1 - share) >= ROOM else "no")
        assert right >= 19


def compared(side, clock, *, mechanism, windows=1.2, turns=SIEVE + 8, share=0.5):
    """A size whose softmax takes 1, softmax in windows `windows`, and the best of two mechanisms `mechanism`."""
    size = ceiling_of(share, clock, side)
    kinds = {"softmax": "now", "windows": "windows", "ceiling": "ceiling", "hydra": "mechanism", "linear": "mechanism"}
    costs = [1.0, windows, 1 - share, mechanism, 1.1 * mechanism]
    times = sampled(clock, dict(zip(kinds, costs, strict=True)), turns)
    size.rows = [Row(name, kinds[name], 0, seconds, kinds[name] == "mechanism") for name, seconds in times.items()]
    return size


def test_yes_from_the_size_from_which_on_a_mechanism_is_faster_than_every_rival():
    clock = Noisy(1)
    costs = {224: 1.3, 320: 1.2, 448: 0.8, 640: 0.7}
    verdict = decide("planted", [compared(side, clock, mechanism=cost) for side, cost in costs.items()])
    assert (verdict.answer, verdict.from_size, verdict.below) == ("yes", (448, 448), (320, 320))
    assert verdict.winner.name == "hydra"
    assert verdict.sentence.startswith("Yes from 448 x 448. planted: at 448 x 448 hydra is 1.2")
    assert "At 320 x 320 it does not pay. Quality not measured." in verdict.sentence


def test_a_size_without_mechanisms_is_not_called_undecided():
    clock = Noisy(1)
    verdict = decide("planted", [ceiling_of(0.4, clock, 448), compared(640, clock, mechanism=0.7)])
    assert verdict.answer == "yes"
    assert "At 448 x 448 no mechanism was measured; more --minutes measure it." in verdict.sentence


def test_larger_sizes_without_mechanisms_are_named_and_do_not_hide_a_yes():
    clock = Noisy(1)
    verdict = decide("planted", [compared(448, clock, mechanism=0.7), ceiling_of(0.4, clock, 640)])
    assert (verdict.answer, verdict.from_size) == ("yes", (448, 448))
    assert "Above 448 x 448 no mechanism was measured; more --minutes measure it." in verdict.sentence


def test_windows_that_are_faster_say_no():
    verdict = decide("planted", [compared(448, Noisy(2), mechanism=0.8, windows=0.65)])
    assert verdict.answer == "no"
    assert "windows is 1.2" in verdict.sentence


def test_what_loses_quality_decides_nothing():
    size = compared(448, Noisy(3), mechanism=0.8)
    size.rows.append(Row("fewer pixels", "loses quality", seconds=[0.1] * 10))
    assert decide("planted", [size]).answer == "yes"


def test_five_turns_decide_nothing():
    size = ceiling_of(0.5, Noisy(4), turns=5)
    verdict = decide("planted", [size], busy=1.4)
    assert verdict.answer == "undecided"
    assert "5 turns, six are needed" in verdict.sentence
    assert "Clock 1.4 x processor time: repeat on an idle machine." in verdict.sentence


def test_a_busy_machine_is_said():
    assert "busy: clock 1.5 x" in decide("planted", [ceiling_of(0.02, Noisy(5))], busy=1.5).sentence


def test_equal_mechanisms_are_rarely_called_faster():
    """The interval is that of turns after those that chose the mechanism; of 100, at most a few."""
    yes = sum(state_of(compared(448, Noisy(seed), mechanism=1.0, turns=SIEVE + 6)) == "pays" for seed in range(100))
    assert yes <= 8


def test_nothing_measured_is_undecided():
    verdict = decide("planted", [Measured((224, 224), 1.17)])
    assert verdict.answer == "undecided"
    assert "1.17x at 224 x 224" in verdict.sentence


@pytest.mark.parametrize(("reached", "share"), [(0.5, 1.0), (0.75, 0.5), (1.0, 0.0)])
def test_the_share_of_the_gain_of_the_ceiling(reached, share):
    size = compared(448, Noisy(6, alone=0), mechanism=reached)
    (hydra,) = [row for row in size.rows if row.name == "hydra"]
    assert size.share(hydra).median == pytest.approx(share)


def test_no_room_has_no_share():
    size = compared(224, Noisy(7), mechanism=0.97, share=0.05)
    assert size.share(size.rows[3]) is None
