"""Order, shares and seeds of samples."""

import itertools

import pytest
from torch.utils.data import DistributedSampler

import linvit
from linvit.data.loading.sampler import EvalSampler, TrainSampler, check_equal_batches


def dealt(length, world, epoch=0, seed=0, **options):
    """What each rank gets."""
    shares = []
    for rank in range(world):
        sampler = TrainSampler(length, seed, rank, world, **options)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    return shares


@pytest.mark.parametrize(("world", "total"), [(1, 240), (3, 240), (64, 256)])
def test_ranks_share_the_set_without_overlap_in_equal_steps(world, total):
    shares = dealt(total, world)
    assert {len(share) for share in shares} == {total // world}
    assert sorted(one.row for share in shares for one in share) == list(range(total))


@pytest.mark.parametrize(("length", "world", "batch", "expected"), [(103, 4, 8, 24), (103, 4, 30, 25), (7, 2, 1, 3)])
def test_what_does_not_fill_a_step_of_all_ranks_is_dropped(length, world, batch, expected):
    shares = dealt(length, world, batch_size=batch)
    assert [len(share) for share in shares] == [expected] * world
    rows = [one.row for share in shares for one in share]
    assert len(set(rows)) == len(rows)


def test_the_order_follows_from_seed_and_epoch_alone():
    first = dealt(100, 1)
    assert first == dealt(100, 1)
    for other in (dealt(100, 1, epoch=1), dealt(100, 1, seed=1)):
        assert [one.row for one in other[0]] != [one.row for one in first[0]]
        assert not {one.seed for one in other[0]} & {one.seed for one in first[0]}


@pytest.mark.parametrize("repeated_aug", [1, 3])
def test_a_sample_s_seed_does_not_depend_on_the_rank_layout(repeated_aug):
    alone, shared = (sorted(itertools.chain(*dealt(96, world, repeated_aug=repeated_aug))) for world in (1, 4))
    assert alone == shared


def test_repeats_land_on_different_ranks_with_different_seeds_and_the_epoch_stays_as_long():
    shares = dealt(90, 3, repeated_aug=3)
    assert [len(share) for share in shares] == [30] * 3
    for copies in zip(*shares, strict=True):  # the same step of the three ranks
        assert len({one.row for one in copies}) == 1
        assert len({one.seed for one in copies}) == 3
    assert len({one.row for one in shares[0]}) == 30


@pytest.mark.parametrize(("length", "world"), [(10, 1), (11, 4), (1797, 64)])
def test_evaluation_has_every_sample_once(length, world):
    shares = [list(EvalSampler(length, rank, world)) for rank in range(world)]
    assert sorted(one.row for share in shares for one in share) == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [len(EvalSampler(length, rank, world)) for rank in range(world)] == list(map(len, shares))


@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (2, 4), (6, 3)])
def test_where_devices_wait_for_each_other_all_must_evaluate_as_many_batches(world, batch_size):
    outcomes = set()
    for length in range(6, 40):
        batches = {-(-len(EvalSampler(length, rank, world)) // batch_size) for rank in range(world)}
        outcomes.add(len(batches))
        if len(batches) == 1:
            check_equal_batches(length, world, batch_size)
        else:
            with pytest.raises(linvit.UserError, match=rf"\({length} samples in batches of {batch_size}\)"):
                check_equal_batches(length, world, batch_size)
    assert outcomes == ({1} if world == 1 else {1, 2})  # both came up


@pytest.mark.parametrize("make", [lambda: TrainSampler(3, 0, 0, 4), lambda: EvalSampler(3, 0, 4)])
def test_more_devices_than_images(make):
    with pytest.raises(linvit.UserError, match="3 images cannot be shared by 4 devices"):
        make()


def test_lightning_takes_them_for_distributed_ones():
    assert issubclass(TrainSampler, DistributedSampler)
    assert issubclass(EvalSampler, DistributedSampler)
