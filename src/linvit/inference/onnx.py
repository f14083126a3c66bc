"""Exports a module as an ONNX file, and runs such a file in onnxruntime."""

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linvit.errors import UserError
from linvit.heads.detection.boxes import onnx_translations

OPSET = 20
SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of a node with the modules that contain it, "['', 'head', 'head.fc', 'linear']"; other metadata is left
out, since lines of code would name folders of this machine."""


def require(*packages: str) -> tuple[Any, ...]:
    """Imports packages of the extra `linvit[export]`; raises a `UserError` with the command to install it."""
    try:
        return tuple(map(importlib.import_module, packages))
    except ImportError as error:
        raise UserError(
            f"ONNX files need onnx, onnxscript and onnxruntime, and {error.name} is not installed: "
            "pip install 'linvit[export]'"
        ) from error


@torch.no_grad()
def to_onnx(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    dynamic: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Any:
    """Exports a module in evaluation mode by `torch.onnx.export(dynamo=True)`, an `onnx.ModelProto` of opset 20.

    `dynamic` are the dimensions of variable size, as `dynamic_shapes` of `torch.export.export`.
    """
    require("onnx", "onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            model,
            inputs,
            dynamo=True,
            dynamic_shapes=dynamic,
            opset_version=OPSET,
            input_names=input_names,
            output_names=output_names,
            custom_translation_table=onnx_translations(),
            verbose=False,
        )
    for node in program.model.graph.all_nodes():
        for name in {*node.metadata_props} - {SCOPES}:
            del node.metadata_props[name]
    return program.model_proto


def in_onnxruntime(content: bytes, threads: int | None = None) -> Callable[..., list[Tensor]]:
    """Returns a function that runs an ONNX file on the CPU, tensors in, tensors out."""
    (runtime,) = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        given = {name: np.ascontiguousarray(x.numpy()) for name, x in zip(names, tensors, strict=True)}
        return [torch.from_numpy(found) for found in session.run(None, given)]

    return run
