"""The linear layer is torch's, compiled or not."""

import torch
from torch import nn

from linvit.layers.mlp import Linear
from tests.helpers import randn


def test_compiled_it_adds_its_bias_behind_the_product() -> None:
    layer, x = Linear(4, 3), randn(2, 5, 4, dtype=torch.float32)
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert len(seen) == 2  # the product and the sum
    torch.testing.assert_close(compiled, layer(x))
    torch.testing.assert_close(layer(x), nn.Linear.forward(layer, x), rtol=0, atol=0)


def test_exported_it_is_one_operation() -> None:
    program = torch.export.export(Linear(4, 3), (torch.ones(2, 4),))
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.linear.default
    ]
