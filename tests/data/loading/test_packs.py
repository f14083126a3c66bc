"""Packs of images by tokens: no image twice, equal steps of all ranks, the same schedule after a resume."""

import numpy as np
import pytest

import linvit
from linvit.data.loading.packs import EvalPackSampler, PackSampler, check_lengths, first_fit
from linvit.data.loading.sampler import EpochProgress

LENGTHS = np.random.default_rng(0).integers(4, 60, 300)
BUDGET = 256


def dealt(world, epoch=0, lengths=LENGTHS):
    """The samplers of all ranks, and the packs that each yields."""
    samplers = [PackSampler(lengths, BUDGET, 5, rank, world) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers, [list(sampler) for sampler in samplers]


def tokens(pack, lengths=LENGTHS):
    return int(lengths[[use.row for use in pack.uses]].sum())


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_get_all_images_in_equally_many_packs_within_the_budget_in_every_epoch(world):
    for epoch in range(20):
        samplers, shares = dealt(world, epoch)
        assert {len(share) for share in shares} == {len(samplers[0])} == {len(dealt(world)[0][0])}
        rows = [use.row for share in shares for pack in share for use in pack.uses]
        assert sorted(rows) == [*range(len(LENGTHS))]
        assert max(tokens(pack) for share in shares for pack in share) <= BUDGET
        assert np.mean([tokens(pack) for share in shares for pack in share]) > 0.9 * BUDGET


def test_the_ranks_of_a_step_have_about_equally_many_tokens():
    steps = zip(*dealt(3)[1], strict=True)
    spreads = sorted(max(map(tokens, step)) - min(map(tokens, step)) for step in steps)
    assert spreads[len(spreads) // 2] <= 2
    assert spreads[-2] <= 20  # one step may have the last packs, which nothing fills


@pytest.mark.parametrize("world", [1, 2])
def test_no_image_is_left_out_where_orders_need_different_numbers_of_packs(world):
    lengths = np.random.default_rng(0).integers(2, 49, 60)
    orders = [np.random.default_rng([5, epoch]).permutation(60) for epoch in range(30)]
    assert max(len(first_fit(lengths, order, 60)) for order in orders) > PackSampler(lengths, 60, 5).total
    for epoch in range(30):
        samplers = [PackSampler(lengths, 60, 5, rank, world) for rank in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert sorted(use.row for sampler in samplers for pack in sampler for use in pack.uses) == [*range(60)]


def test_every_image_has_one_weight():
    _, (packs,) = dealt(1)
    assert {round(pack.weight / len(pack.uses), 12) for pack in packs} == {
        round(packs[0].weight / len(packs[0].uses), 12)
    }
    assert np.mean([pack.weight for pack in packs]) == pytest.approx(1)


def test_images_that_fill_more_than_half_of_a_pack_are_not_left_out():
    _, (packs,) = dealt(1, lengths=np.full(10, 150))
    assert sorted(use.row for pack in packs for use in pack.uses) == [*range(10)]


@pytest.mark.parametrize("world", [1, 3])
def test_a_resumed_epoch_has_the_packs_that_are_left(world):
    samplers, shares = dealt(world, epoch=2)
    for sampler, share in zip(samplers, shares, strict=True):
        sampler.progress = EpochProgress(2, 4 * world)
        assert list(sampler) == share[4:]
        assert sampler.batches_done == 4


def test_seeds_and_schedule_follow_from_seed_and_epoch():
    assert dealt(1)[1] == dealt(1)[1] != dealt(1, epoch=1)[1]
    seeds = [use.seed for pack in dealt(1)[1][0] for use in pack.uses]
    assert len(set(seeds)) == len(seeds)


def test_evaluation_has_all_images_in_order():
    packs = list(EvalPackSampler(LENGTHS, BUDGET))
    assert [use.row for pack in packs for use in pack.uses] == [*range(len(LENGTHS))]
    assert max(map(tokens, packs)) <= BUDGET
    shares = [[use.row for pack in EvalPackSampler(LENGTHS, BUDGET, rank, 3) for use in pack.uses] for rank in range(3)]
    assert sorted(row for share in shares for row in share) == [*range(len(LENGTHS))]


def test_first_fit_fills_gaps_with_smaller_images():
    assert first_fit(np.array([6, 6, 4, 4]), np.arange(4), 10) == [[0, 2], [1, 3]]


def test_an_image_that_no_batch_has_room_for_is_refused():
    with pytest.raises(linvit.UserError, match=r"300 tokens, more than token_budget=256.*--data.max_tokens=256"):
        check_lengths(np.array([10, 300]), BUDGET)
