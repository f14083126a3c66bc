"""What each block gets: its attention and its stochastic depth."""

import pytest

from linvit import UserError
from linvit.backbones.stage import specs_and_rates, specs_per_block

FOCUSED = {"name": "focused", "focusing_factor": 4}


@pytest.mark.parametrize(
    ("attention", "depths", "want"),
    [
        ("linear", [2, 1], ["linear"] * 3),
        (FOCUSED, [2, 1], [FOCUSED] * 3),
        (["linear", FOCUSED], [2, 1], ["linear", "linear", FOCUSED]),
        (("linear", FOCUSED, "softmax"), [2, 1], ["linear", FOCUSED, "softmax"]),
        (["linear"], [3], ["linear"] * 3),
        (["linear", "softmax"], [1, 1], ["linear", "softmax"]),
    ],
)
def test_one_spec_or_one_per_stage_or_one_per_block(attention: object, depths: list[int], want: list[object]) -> None:
    assert specs_per_block(attention, depths) == want


@pytest.mark.parametrize(
    ("depths", "message"),
    [
        ([2, 3, 1], r"attention lists 2 specs, but this backbone has 6 block\(s\) in 3 stage\(s\). Give .* 3 .* 6 "),
        (
            [4],
            r"attention lists 2 specs, but .* has 4 block\(s\) in 1 stage\(s\). Give one spec for all, 1 .* 4",
        ),
    ],
)
def test_list_of_another_length_is_refused(depths: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        specs_per_block(["linear", "softmax"], depths)


def test_every_block_of_every_stage_gets_its_own() -> None:
    specs, rates = specs_and_rates(["linear", FOCUSED, "softmax"], 0.5, [2, 1, 3])
    assert specs == [["linear", "linear"], [FOCUSED], ["softmax"] * 3]
    assert [len(stage) for stage in rates] == [2, 1, 3]
    assert [rate for stage in rates for rate in stage] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
