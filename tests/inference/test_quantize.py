"""What is in 8 bits: what layers compute."""

import onnx
import torch
from torch import Tensor, nn

from linvit.inference.quantize import quantise
from linvit.testing.onnx import to_onnx


class WithOwnWeights(nn.Module):
    """A product by a layer, and one by weights that are no layer's, such as a mechanism's random features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images) @ self.own


def test_weights_that_are_no_layers_stay_in_float():
    module, images = WithOwnWeights().eval(), torch.randn(2, 3, 8, 8)
    content = to_onnx(module, (images,), input_names=["images"]).SerializeToString()
    graph = onnx.load_from_string(quantise(content, [images], module)).graph
    restored = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    factors = {len(restored & {*node.input}): node.input for node in graph.node if node.op_type in ("MatMul", "Gemm")}
    assert factors.keys() == {0, 2}
    assert "own" in factors[0]
