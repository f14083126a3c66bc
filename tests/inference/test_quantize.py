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
    products = [[*node.input[:2]] for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert sorted(len(restored & {*factors}) for factors in products) == [0, 2]
    assert "own" in {*products[0], *products[1]} - restored
