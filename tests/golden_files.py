"""Golden vectors in tests/golden: reading them, the reference's parameter names, and the tolerance stored with them.

Each file holds what an official implementation computes: parameters, inputs, output, and the gradients of
`sum(output * probe)`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from linvit import AttentionLayer, Grid
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import DEIT, PVT, SWIN
from linvit.weights.layouts.layout import Layout

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One vector: metadata and tensors."""

    name: str
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def constructor(self) -> dict[str, Any]:
        """Official constructor arguments."""
        return dict(self.meta["constructor"])

    @property
    def kwargs(self) -> dict[str, Any]:
        """Official keyword arguments of the call, such as H and W."""
        return dict(self.meta["call"]["kwargs"])

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """The positional arguments of the call, ready for gradients."""
        return [self.tensors[name].to(dtype, copy=True).requires_grad_() for name in self.meta["call"]["args"]]

    def parameters(self, prefix: str = "") -> dict[str, Tensor]:
        """Official state dict below a prefix."""
        start = f"param.{prefix}"
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The official parameters, ready for gradients, which `check_leaves` holds to the stored ones."""
        return {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in self.parameters().items()}

    def check_leaves(self, leaves: Mapping[str, Tensor]) -> None:
        """Holds the gradients of `leaves`; what of them reaches a module may be renamed, reshaped and joined."""
        assert {f"grad_param.{name}" for name in leaves} == set(self.named("grad_param."))
        for name, leaf in leaves.items():
            self.check(f"grad_param.{name}", leaf.grad)

    def named(self, start: str) -> list[str]:
        """Names of the stored tensors that begin so, such as "grad_param."."""
        return [name for name in self.tensors if name.startswith(start)]

    def check(self, name: str, got: Tensor) -> None:
        """Holds a tensor to the stored one, element by element, within the stored tolerance: integers have none."""
        tolerance = self.meta["tolerance"].get(name, {"rtol": 0, "atol": 0})
        torch.testing.assert_close(
            got.detach().double(),
            self.tensors[name].double(),
            rtol=tolerance["rtol"],
            atol=tolerance["atol"],
            msg=lambda message: f"{self.name}: {name}: {message}",
        )

    def check_call(self, output: Tensor, inputs: list[Tensor]) -> None:
        """Holds the output and the gradient of every input; leaves parameter gradients in `.grad`."""
        self.check("output", output)
        (output * self.tensors["probe"].to(output.dtype)).sum().backward()
        for name, tensor in zip(self.meta["call"]["args"], inputs, strict=True):
            assert tensor.grad is not None
            self.check(name.replace("input", "grad_input"), tensor.grad)

    def check_qkv(self, output: Tensor, given: list[Tensor]) -> None:
        """Holds the output and the gradients of inputs that are stored under the names of q, k and v."""
        self.check("output", output)
        (output * self.tensors["probe"].to(output.dtype)).sum().backward()
        for name, tensor in zip("qkv", given, strict=True):
            self.check(f"grad_input.{name}", tensor.grad)

    def named_inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The inputs of a dense file by name; those of floating point are ready for gradients."""
        given = {name.removeprefix("input."): self.tensors[name] for name in self.named("input.")}
        return {
            name: t.to(dtype, copy=True).requires_grad_() if t.is_floating_point() else t for name, t in given.items()
        }

    def check_outputs(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Holds the outputs of a dense file, and the gradients of its inputs; leaves parameter gradients in `.grad`."""
        assert list(outputs) == self.meta["outputs"]
        names = {name: "output" if name == "output" else f"output.{name}" for name in outputs}
        for name, output in outputs.items():
            self.check(names[name], output)
        differentiated = self.meta["differentiated"]
        probes = [self.tensors[names[name].replace("output", "probe", 1)] for name in differentiated]
        total = sum((outputs[n] * probe).sum() for n, probe in zip(differentiated, probes, strict=True))
        assert isinstance(total, Tensor)
        total.backward()
        for name in self.named("grad_input."):
            self.check(name, inputs[name.removeprefix("grad_input.")].grad)

    def check_parameters(self, module: nn.Module, our_name: Callable[[str], str]) -> None:
        """Holds the gradient of every official parameter, and what BatchNorm keeps after a step of training."""
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        for name in self.named("grad_param."):
            grad = parameters[our_name(name.removeprefix("grad_param."))].grad
            self.check(name, grad.view_as(self.tensors[name]))
        for name in self.named("after."):
            self.check(name, buffers[our_name(name.removeprefix("after."))])

    def regenerated(self) -> dict[str, Tensor]:
        """The official state dict of a file whose parameters are too many to be stored, drawn by its recipe."""
        recipe, state = self.meta["recipe"], {}
        for name, shape, kind, a, b, seed in recipe["tensors"]:
            draw = np.random.RandomState(seed)
            if kind == "int64_zero":
                state[name] = torch.zeros(shape, dtype=torch.int64)
                continue
            numbers = draw.standard_normal(shape) if kind == "normal" else draw.random_sample(shape)
            state[name] = torch.from_numpy(np.asarray((a + b * numbers).astype(np.float32)))
        for name, (total, absolute) in recipe["checksum"].items():
            double = state[name].double()
            assert [double.sum().item(), double.abs().sum().item()] == pytest.approx([total, absolute], rel=1e-9)
        return state


@cache
def load(name: str) -> Golden:
    """Reads tests/golden/NAME.safetensors."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        meta = json.loads(file.metadata()["golden"])
        return Golden(name, meta, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118


def of_case(*cases: str) -> Any:
    """Parametrises a test over `golden`: every file of these cases."""
    files = [load(path.stem) for path in sorted(FOLDER.glob("*.safetensors"))]
    chosen = [golden for golden in files if golden.meta["case"] in cases]
    assert {golden.meta["case"] for golden in chosen} == set(cases)
    return pytest.mark.parametrize("golden", chosen, ids=lambda golden: golden.name)


both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def attention_layer(golden: Golden, attention: Any, size: tuple[int, int], dtype: torch.dtype) -> AttentionLayer:
    """Our layer for an official attention module, with its parameters."""
    official = golden.constructor
    layer = AttentionLayer(
        official["dim"],
        official["num_heads"],
        Grid(size),
        attention=attention,
        qkv_bias=official.get("qkv_bias", False),
        sr_ratio=1 if official.get("linear") else official.get("sr_ratio", 1),
        sr_pool=7 if official.get("linear") else 0,
    ).to(dtype)
    load_official(layer, golden.parameters())
    return layer.eval()


def focused_spec(golden: Golden) -> dict[str, Any]:
    """The spec of our focused attention for an official constructor."""
    official = golden.constructor
    return {
        "name": "focused",
        "focusing_factor": official["focusing_factor"],
        "dwc_kernel": official["kernel_size"],
    }


def load_official(layer: AttentionLayer, official: Mapping[str, Tensor]) -> None:
    """Loads an official attention module; separate q and kv projections are fused where we have one."""
    state = {_our_name(name): tensor for name, tensor in official.items()}
    if layer.sr is None:
        for kind in ("weight", "bias"):
            if f"q.{kind}" in state:
                state[f"qkv.{kind}"] = torch.cat([state.pop(f"q.{kind}"), state.pop(f"kv.{kind}")])
    layer.load_state_dict(state)


def our_state(leaves: Mapping[str, Tensor], layout: Layout, theirs: str, ours: str) -> dict[str, Tensor]:
    """Official parameters of a module as those of ours, by the layout of a family.

    Args:
        leaves: The parameters.
        layout: The layout.
        theirs: What stands before their names in a checkpoint: "blocks.0.attn.".
        ours: What the layout makes of it.
    """
    named = layout.translate({f"{theirs}{name}": tensor for name, tensor in leaves.items()})
    assert all(name.startswith(ours) for name in named)
    return {name.removeprefix(ours): tensor for name, tensor in named.items()}


def layer_state(golden: Golden, leaves: Mapping[str, Tensor], layer: AttentionLayer) -> dict[str, Tensor]:
    """Official parameters of an attention module as those of our layer, by the layout of the family in its case."""
    layout, block = {
        "deit": (DEIT, "blocks.0."),
        "pvt": (PVT, "block1.0."),
        "swin": (SWIN, "layers.0.blocks.0."),
    }[golden.meta["case"].rpartition("_")[2]]
    state = our_state(leaves, layout, f"{block}attn.", layout.rename(block))
    fitted = fit_projections(state, nn.ModuleDict({"attn": layer}))
    return {name.removeprefix("attn."): tensor for name, tensor in fitted.items()}


def check_layer_gradients(golden: Golden, layer: AttentionLayer) -> None:
    """Holds the gradient of every official parameter to the stored one."""
    names = golden.named("grad_param.")
    assert names
    for name in names:
        golden.check(name, _gradient(layer, name.removeprefix("grad_param.")))


def _gradient(layer: nn.Module, official: str) -> Tensor:
    parameters = dict(layer.named_parameters())
    module, _, kind = official.partition(".")
    if module in ("q", "kv") and "q.weight" not in parameters:  # a slice of our fused projection
        fused = parameters[f"qkv.{kind}"].grad
        width = fused.shape[0] // 3
        return fused[:width] if module == "q" else fused[width:]
    return parameters[_our_name(official)].grad


def _our_name(official: str) -> str:
    module, dot, rest = official.partition(".")
    if module in ("scale", "positional_encoding", "dwc"):
        return f"mechanism.{official}"
    return {"sr": "sr.conv", "norm": "sr.norm"}.get(module, module) + dot + rest
