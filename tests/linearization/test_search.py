"""Which blocks can take another attention."""

import pytest
import timm
import torch

from linvit import create_backbone
from linvit.linearization.student import Conversions, greedy_order, linearize

SMALL = {"img_size": 64, "num_classes": 3}
NETWORKS = {
    "deit": lambda: create_backbone({"name": "deit_nano", "img_size": 64}, num_classes=3),
    "partly linear": lambda: create_backbone("deit_nano", attention=["softmax", "linear", "softmax", "softmax"]),
    "pvt_v2": lambda: create_backbone(
        {"name": "pvt_v2_b0", "embed_dims": [8] * 4, "num_heads": [1] * 4, "depths": [1, 2, 1, 1]}, **SMALL
    ),
    "swin of timm": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", embed_dim=12, depths=(1, 2), num_heads=(1, 2), window_size=4, **SMALL
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_chosen_blocks_are_those_of_the_list(name):
    teacher = NETWORKS[name]().eval()
    side = 32 if name == "partly linear" else 64
    images = torch.randn(2, 3, side, side)
    conversions = Conversions(teacher, "linear", side)
    assert conversions.blocks == ([0, 2, 3] if name == "partly linear" else list(range(len(conversions.layers))))
    for converted in ([0, 2], [], [2]):
        student = linearize(teacher, conversions.specs(converted), side)
        assert torch.equal(conversions.network(converted)(images), student(images))
    assert torch.equal(conversions.network([])(images), teacher(images))


def test_next_is_what_costs_least_given_those_before():
    alone, together = {3: 1.0, 5: 2.0, 7: 3.0}, {frozenset({3, 5}): 9.0}
    asked = []

    def error(blocks):
        asked.append(blocks)
        return together.get(frozenset(blocks), sum(alone[block] for block in blocks))

    assert list(greedy_order(list(alone), error)) == [3, 7, 5]
    assert len(asked) == 6
