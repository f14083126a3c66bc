"""Which blocks suffer most from another attention."""

import pytest
import torch

from linvit import UserError, create_backbone
from linvit.linearization.sensitivity import keeping, sensitivities


def test_a_block_that_does_nothing_does_not_suffer():
    teacher = create_backbone("deit_nano", num_classes=10)
    with torch.no_grad():
        teacher.blocks[1].attn.proj.weight.zero_()
        teacher.blocks[3].attn.proj.weight.mul_(30)
    found = sensitivities(teacher, "linear", [torch.randn(2, 3, 32, 32) for _ in range(2)])
    assert list(found) == [f"blocks.{i}.attn" for i in range(4)]
    assert found["blocks.1.attn"] == 0
    assert max(found, key=found.get) == "blocks.3.attn"
    assert sensitivities(teacher, "softmax", [torch.randn(2, 3, 32, 32)]) == dict.fromkeys(found, 0.0)
    assert keeping("linear", found, 1) == ["linear", "linear", "linear", None]
    assert keeping("linear", found, 3)[1] == "linear"
    with pytest.raises(UserError, match="of 4 blocks 0 to 3 can be kept; got 4"):
        keeping("linear", found, 4)
