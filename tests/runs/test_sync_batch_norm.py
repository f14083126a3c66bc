"""BatchNorm over all ranks: the network stays the one that it was."""

import timm
import torch
from torch import nn

from linvit.runs.trainer import SyncBatchNorm
from tests.cli.runs import QUICKSTART, linvit, tiny


def test_the_network_computes_what_it_did():
    torch.manual_seed(0)
    network = timm.create_model("efficientnet_lite0", num_classes=3).eval()  # its BatchNorms hold activations
    images = torch.randn(2, 3, 32, 32)
    expected = network(images)
    count = sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    for converted in (SyncBatchNorm().apply(network), SyncBatchNorm().revert(network)):
        assert sum(isinstance(module, nn.SyncBatchNorm) for module in converted.modules()) == count > 0
        torch.testing.assert_close(converted(images), expected)


def test_on_cpus_it_is_refused_before_anything_starts(tmp_path):
    options = ["--trainer.sync_batchnorm=true", "--trainer.devices=2", "--trainer.strategy=ddp"]
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(), *options, cwd=tmp_path)
    assert done.code == 2
    assert "on GPUs only: remove --trainer.sync_batchnorm" in done.err
