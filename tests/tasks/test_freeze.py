"""Parts of a network that are not trained."""

import pytest
import torch

from linvit import UserError
from tests.training import fit, tiny_task

NORMED = {"name": "timm", "model": "resnet10t"}


def test_what_is_frozen_is_the_same_to_the_last_bit_after_training(tmp_path):
    task = tiny_task(backbone=NORMED, freeze=["conv1.*", "layer1.*"], lr=0.1, warmup_epochs=0)
    before = {name: value.clone() for name, value in task.network.state_dict().items()}
    fit(task, tmp_path)
    same = {name for name, value in task.network.state_dict().items() if torch.equal(value, before[name])}
    frozen = {name for name in before if name.startswith(("conv1.", "layer1."))}  # running statistics, too
    assert frozen <= same
    assert not {name for name in same - frozen if name.endswith(("weight", "running_mean"))}
    task.train()
    assert not task.network.layer1.training
    assert task.network.layer2.training


def test_frozen_parameters_are_not_optimised(tmp_path):
    task = tiny_task(freeze=["blocks.*.mlp.*"])
    groups = []
    task.on_train_batch_start = lambda *_: groups.extend(task.optimizers().param_groups)
    fit(task, tmp_path)
    optimised = {id(parameter) for group in groups for parameter in group["params"]}
    left = {name for name, parameter in task.network.named_parameters() if id(parameter) not in optimised}
    assert left == {name for name, _ in task.network.named_parameters() if ".mlp." in name}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [(["backbone.*"], r"no parameter of the network is called 'backbone\.\*'"), (["*"], "no parameter to train")],
)
def test_patterns_are_checked(patterns, message):
    with pytest.raises(UserError, match=message):
        tiny_task(freeze=patterns)
