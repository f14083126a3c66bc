"""A linear layer with BatchNorm: the 1 x 1 convolution and BatchNorm2d of the same parameters."""

import torch
from torch import nn
from torch.nn import functional as F

from linvit.layers.mlp import BatchNormLinear
from tests.helpers import assert_near, assert_same_gradients, perturb, randn


def test_equals_a_convolution_and_batch_norm_of_the_plane() -> None:
    """In training, where the statistics are those of the batch, and then with the running statistics."""
    layer = perturb(BatchNormLinear(6, 4).double())
    norm = nn.BatchNorm2d(4).double()
    norm.load_state_dict(layer.norm.state_dict())

    def reference(x: torch.Tensor) -> torch.Tensor:
        plane = F.conv2d(x.mT.unflatten(2, (3, 5)), layer.weight[..., None, None])
        return norm(plane).flatten(2).mT

    x = randn(2, 15, 6, grad=True)
    assert layer.bias is None
    assert_same_gradients(layer(x), reference(x), [x, layer.weight], 1e-12)
    assert_near(layer.norm.running_var, norm.running_var, 1e-14)
    in_training = layer(x)
    reference(x)
    layer.eval()
    norm.eval()
    assert_near(layer(x), reference(x), 1e-14)
    assert (layer(x) - in_training).abs().max() > 0.1


def test_synchronised_between_devices_it_is_still_of_the_tokens() -> None:
    layer = perturb(BatchNormLinear(6, 4)).eval()
    x = randn(2, 15, 6, dtype=torch.float32)
    want = layer(x)
    assert torch.equal(nn.SyncBatchNorm.convert_sync_batchnorm(layer)(x), want)
