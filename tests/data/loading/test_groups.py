"""Steps of samples of one group: order, shares of ranks, epochs that go on in the middle."""

import itertools

import numpy as np
import pytest

from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import TrainSampler

GROUPS = (np.random.default_rng(0).random(103) < 0.3).astype(int)


class Rows:
    """Gives back what the sampler asks for."""

    def __getitem__(self, index):
        return index


def steps(world, batch, state=None, batches=None, epoch=4, groups=GROUPS, **options):
    """The samples of each step, of all ranks, and the state of the loaders behind the last one."""
    shares, states = [], []
    for rank in range(world):
        sampler = TrainSampler(len(groups), 3, rank, world, batch_size=batch, groups=groups, **options)
        loader = make_loader(Rows(), batch, 0, list, sampler, training=True)
        if state is not None:
            loader.load_state_dict(state)
        sampler.set_epoch(epoch)
        planned = len(loader) - loader.batches_done
        shares.append(list(itertools.islice(loader, planned if batches is None else batches)))
        states.append(loader.state_dict())
    assert all(one == states[0] for one in states)
    return [[one for share in step for one in share] for step in zip(*shares, strict=True)], states[0]


def mixed(found, groups=GROUPS):
    """How many steps are of both groups."""
    return sum(len({groups[one.row] for one in step}) > 1 for step in found)


@pytest.mark.parametrize(("world", "batch"), [(1, 4), (2, 4), (3, 2)])
def test_all_steps_but_one_are_of_one_group(world, batch):
    found, _ = steps(world, batch)
    rows = [one.row for step in found for one in step]
    assert len(found) == 103 // (world * batch)
    assert len(set(rows)) == len(rows)
    assert mixed(found) <= 1
    assert {GROUPS[step[0].row] for step in found[: len(found) // 2]} == {0, 1}  # in random order


def test_the_order_follows_from_seed_epoch_and_layout_alone():
    first, _ = steps(2, 4)
    assert steps(2, 4)[0] == first
    assert steps(2, 4, epoch=5)[0] != first
    seeds = {one.row: one.seed for step in first for one in step}
    plain = TrainSampler(103, 3)
    plain.set_epoch(4)
    assert seeds.items() <= {one.row: one.seed for one in plain}.items()


@pytest.mark.parametrize("repeated_aug", [1, 3])
def test_a_resumed_epoch_is_the_rest_of_the_whole_one(repeated_aug):
    whole, _ = steps(2, 3, repeated_aug=repeated_aug)
    found, state = [], None
    for batches in (2, 5, None):
        more, state = steps(2, 3, state, batches, repeated_aug=repeated_aug)
        found += more
    assert found == whole
    assert mixed(found) <= 1


def test_another_number_of_ranks_starts_the_epoch_again_and_says_so():
    _, state = steps(1, 4, batches=3)
    with pytest.warns(UserWarning, match="starts again, since its order has changed: ranks was 1 and is 2"):
        found, _ = steps(2, 4, state)
    assert len(found) == 103 // 8
