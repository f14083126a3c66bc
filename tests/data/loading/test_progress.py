"""Epochs that go on in the middle, also with another number of ranks or samples per batch."""

import itertools

import pytest

from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import TrainSampler


class Epoch:
    """An epoch of a map-style set whose ranks change on the way."""

    def __init__(self, length, **options):
        self.length, self.options, self.state, self.rows = length, options, None, []

    def phase(self, ranks, batch_size, batches=None):
        """Trains for some batches, or to the end of the epoch; returns the sizes of the batches of each rank."""
        shares, states = [], []
        for rank in range(ranks):
            sampler = TrainSampler(self.length, 3, rank, ranks, batch_size=batch_size, **self.options)
            loader = make_loader(Rows(), batch_size, 0, list, sampler, training=True)
            if self.state is not None:
                loader.load_state_dict(self.state)
            sampler.set_epoch(7)
            planned = len(loader) - loader.batches_done
            share = list(itertools.islice(loader, planned if batches is None else batches))
            shares.append(share)
            states.append(loader.state_dict())
        assert all(state == states[0] for state in states)
        self.state = states[0]
        self.rows += [one for share in shares for batch in share for one in batch]
        return [[len(batch) for batch in share] for share in shares]


class Rows:
    """Gives back what the sampler asks for."""

    def __getitem__(self, index):
        return index


def test_a_resumed_epoch_is_the_rest_of_the_whole_one():
    whole, parts = Epoch(100), Epoch(100)
    whole.phase(1, 10)
    for batches in (1, 3, 2, None):
        parts.phase(1, 10, batches)
    assert parts.rows == whole.rows


@pytest.mark.parametrize("layouts", [[(1, 8), (2, 4)], [(1, 8), (2, 8), (1, 8), (3, 4)]], ids=str)
@pytest.mark.parametrize("repeated_aug", [1, 3])
def test_on_another_number_of_ranks_every_sample_has_its_turn_once(layouts, repeated_aug):
    epoch, whole = Epoch(240, repeated_aug=repeated_aug), Epoch(240, repeated_aug=repeated_aug)
    whole.phase(1, 8)
    for layout in layouts[:-1]:
        epoch.phase(*layout, 3)
    sizes = epoch.phase(*layouts[-1])
    assert len({len(share) for share in sizes}) == 1
    assert sorted(epoch.rows) == sorted(whole.rows)


def test_ranks_have_as_many_whole_batches_whatever_is_left():
    for length, first, batches, second in itertools.product((97, 120), [(1, 7), (2, 5)], (1, 4), [(3, 4), (5, 6)]):
        epoch = Epoch(length)
        epoch.phase(*first, batches)
        sizes = epoch.phase(*second)
        assert len({len(share) for share in sizes}) == 1
        assert {size for share in sizes for size in share} <= {second[1]}
        assert len(set(epoch.rows)) == len(epoch.rows) > length - second[0] * second[1]


def test_an_epoch_of_other_data_starts_again():
    before = make_loader(Rows(), 10, 0, list, TrainSampler(40, 0, batch_size=10), training=True)
    next(iter(before))
    after = make_loader(Rows(), 10, 0, list, TrainSampler(50, 0, batch_size=10), training=True)
    with pytest.warns(UserWarning, match="starts again, since its order has changed: samples was 40 and is 50"):
        after.load_state_dict(before.state_dict())
    assert after.batches_done == 0
    assert len(list(after)) == 5


def test_batches_are_counted_as_they_are_handed_out_and_not_as_they_are_prefetched():
    loader = make_loader(Rows(), 10, 2, list, TrainSampler(80, 0, batch_size=10), training=True)
    passing = iter(loader)
    next(passing)
    assert loader.state_dict()["samples"] == 10


def test_the_processes_of_a_loader_start_in_the_epoch_that_is_set_before_the_first_batch():
    sampler = TrainSampler(40, 0, batch_size=10)
    loader = make_loader(Rows(), 10, 1, list, sampler, training=True)
    passing = iter(loader)  # as Lightning does
    sampler.set_epoch(3)
    assert [one for batch in passing for one in batch] == list(sampler)


class Unsendable:
    """A data set whose samples no process can send to another."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return lambda: index


def test_a_loader_process_that_cannot_send_a_batch_ends_the_run(capfd):
    """And does not let it wait for ever; the private name of Python that this goes by is gone if it does."""
    loader = make_loader(Unsendable(), 1, 1, list)
    loader.timeout = 5
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        next(iter(loader))
    assert "linvit: error: a loader process cannot send a batch: Can't pickle" in capfd.readouterr().err
