"""A module as an ONNX file."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.ops.functional import pooled
from linvit.inference.onnx import in_onnxruntime, to_onnx


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return pooled(x, 7)


def test_pooling_exported_at_one_size_is_right_at_others():
    any_size = torch.export.Dim.DYNAMIC
    proto = to_onnx(Pool(), (torch.randn(2, 3, 8, 8),), ({0: any_size, 2: any_size, 3: any_size},))
    run = in_onnxruntime(proto.SerializeToString())
    for shape in ((1, 3, 8, 8), (2, 3, 9, 25), (1, 3, 3, 10)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x)[0], F.adaptive_avg_pool2d(x, 7))
