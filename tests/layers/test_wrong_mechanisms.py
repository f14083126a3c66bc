"""A mechanism that breaks its contract is named, with what it returned; so are images of other channels."""

import pytest
import torch
from torch import nn

import linvit
from tests.training import TINY, tiny_task


class Joined(linvit.Attention):
    """Joins the heads, as torch's attention does."""

    def forward(self, q, k, v, grid):
        return v.transpose(1, 2).flatten(2)


class Swapped(linvit.Attention):
    """Tokens before heads."""

    def forward(self, q, k, v, grid):
        return v.transpose(1, 2)


class Narrow(linvit.Attention):
    """Half of the channels."""

    def forward(self, q, k, v, grid):
        return v[..., ::2]


class Pair(linvit.Attention):
    """The output, and its map."""

    def forward(self, q, k, v, grid):
        return v, None


class Empty(linvit.Attention):
    """Nothing."""


WRONG = {Joined: r"\(2, 17, 24\)", Swapped: r"\(2, 17, 3, 8\)", Narrow: r"\(2, 3, 17, 4\)", Pair: "a tuple"}


def built(kind):
    return tiny_task(attention={"name": f"{__name__}:{kind.__name__}"}).network


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_a_mechanism_returned_and_what_was_expected_are_named(kind):
    shapes = r"queries \(2, 3, 17, 8\); expected.*\(2, 3, 17, 8\)"
    words = rf"{kind.__name__} returned {WRONG[kind]} for {shapes}.*linvit check"
    with pytest.raises(linvit.UserError, match=words):
        built(kind)(torch.randn(2, 3, 16, 16))


def test_one_without_forward_is_refused_when_it_is_built():
    with pytest.raises(linvit.UserError, match=r"Empty has no formula: define core.*linvit check"):
        built(Empty)


def test_no_images_are_images():
    layer = linvit.AttentionLayer(24, 3, linvit.Grid((4, 4)))
    assert layer(torch.zeros(0, 16, 24), linvit.Grid((4, 4))).shape == (0, 16, 24)


@pytest.mark.parametrize(
    "backbone", [TINY, {"name": "pvt_tiny", "depths": [1, 1, 1, 1]}, "mlla_tiny", "efficientvit_b0"], ids=str
)
@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_other_channels_are_as_clear_as_those_of_another_size(backbone, channels):
    network = linvit.create_backbone(backbone, img_size=32)
    with pytest.raises(linvit.UserError, match=rf"got images of {channels} channels, .*in_chans={channels}"):
        network(torch.zeros(1, channels, 32, 32))


def test_a_model_that_is_not_timms_is_not_told_to_leave_attention_out():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

    with pytest.raises(linvit.UserError, match=r"MultiheadAttention\. Instead of this model use one of timm's"):
        linvit.replace_attention(Vision(), "linear")
