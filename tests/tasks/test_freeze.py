"""Parts of a network that are not trained."""

import pytest
import torch

from linvit import UserError
from linvit.tasks import ClassificationTask, SegmentationTask
from tests.training import fit, tiny_task

NORMED = {"name": "timm", "model": "resnet10t"}


def test_what_is_frozen_is_the_same_to_the_last_bit_after_training(tmp_path):
    task = tiny_task(backbone=NORMED, freeze=["conv1.*", "layer1"], lr=0.1, warmup_epochs=0)
    before = {name: value.clone() for name, value in task.network.state_dict().items()}
    fit(task, tmp_path)
    same = {name for name, value in task.network.state_dict().items() if torch.equal(value, before[name])}
    frozen = {name for name in before if name.startswith(("conv1.", "layer1."))}  # running statistics, too
    assert frozen <= same
    assert not {name for name in same - frozen if name.endswith(("weight", "running_mean"))}
    task.train()
    assert not task.network.layer1.training
    assert task.network.layer2.training


@pytest.mark.parametrize(
    ("patterns", "message"),
    [(["neck.*"], r"no parameter of the network is called 'neck\.\*'"), (["*"], "no parameter to train")],
)
def test_patterns_are_checked(patterns, message):
    with pytest.raises(UserError, match=message):
        tiny_task(freeze=patterns)


@pytest.mark.parametrize(
    ("task_class", "pattern"), [(ClassificationTask, "stages"), (SegmentationTask, "backbone.*")], ids=str
)
def test_a_frozen_backbone_keeps_nothing_for_a_backward_pass(task_class, pattern):
    head = {"head": "fcn"} if task_class is SegmentationTask else {}
    task = task_class(backbone="pvt_v2_b0", num_classes=3, img_size=32, freeze=[pattern], **head).train()
    network = getattr(task.network, "backbone", task.network)
    assert not any(parameter.requires_grad for parameter in network.stages.parameters())
    assert all(parameter.requires_grad for parameter in task.network.head.parameters())
    assert not network.stages.training
    *_, features = network.forward_intermediates(torch.randn(2, 3, 32, 32), intermediates_only=True)
    assert not features.requires_grad


def test_names_of_modules_freeze_all_in_them():
    task = tiny_task(freeze=["blocks.*.mlp", "backbone.norm"])
    frozen = {name for name, parameter in task.network.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name in dict(task.network.named_parameters()) if ".mlp." in name or name[:5] == "norm."}
