"""An ONNX file in 8 bits: static quantisation by onnxruntime, calibrated on images, and what it costs in the score."""

import tempfile
from ast import literal_eval
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.data.base import ImageData
from linvit.files import replacing
from linvit.inference.export import Export, RunFile, run_onnx
from linvit.tasks.base import Task
from linvit.testing.onnx import SCOPES, require

QUANTISED = ("Conv", "Gemm", "MatMul")
"""The operations in 8 bits, where a layer computes them, `nn.Linear` or a convolution: a mechanism names by its layers
what may be in 8 bits. What it computes itself stays in float, also with weights of its own: feature maps, softmax,
products and sums of queries, keys and values, and what these are divided by."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
CALIBRATION = 256  # images


def quantise_file(
    path: Path, export: Export, run: RunFile, task: Task, data: ImageData
) -> tuple[RunFile, list[float], list[int]]:
    """Replaces the ONNX file of an export, which `run` runs, by one in 8 bits; that, and scores and bytes of both."""
    given = path.read_bytes()
    content = quantise(given, calibration_images(export, data), export.exported)
    with replacing(path) as file:
        file.write(content)
    quantised = run_onnx(content)
    scores = [score(task, export, each, data) for each in (run, quantised)]
    return quantised, scores, [len(given), len(content)]


def quantise(content: bytes, images: Iterable[Tensor], network: nn.Module) -> bytes:
    """Returns an ONNX file with 8-bit weights and activations (QDQ), whose scales follow from batches of images."""
    tools, shapes, onnx = require("onnxruntime.quantization", "onnxruntime.quantization.shape_inference", "onnx")
    with tempfile.TemporaryDirectory(prefix="linvit-quantise-") as folder:
        given, prepared, made = (str(Path(folder, f"{name}.onnx")) for name in ("given", "prepared", "made"))
        Path(given).write_bytes(content)
        shapes.quant_pre_process(given, prepared, skip_symbolic_shape=True)
        layers = {name for name, module in network.named_modules() if isinstance(module, LAYERS)}
        of_layers = {
            node.name
            for node in onnx.load_from_string(content).graph.node
            for said in node.metadata_props
            if said.key == SCOPES and layers & {*literal_eval(said.value)[-2:]}
        }
        others = [node.name for node in onnx.load(prepared).graph.node if node.name.partition("/")[0] not in of_layers]
        feeds = ({"images": batch.numpy()} for batch in images)
        tools.quantize_static(
            prepared,
            made,
            SimpleNamespace(get_next=lambda: next(feeds, None)),
            quant_format=tools.QuantFormat.QDQ,
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            nodes_to_exclude=others,
        )
        found = onnx.load(made)
    del found.metadata_props[:]
    found.metadata_props.extend(onnx.load_from_string(content).metadata_props)
    found.metadata_props.add(key="quantised", value=", ".join(QUANTISED))
    return bytes(found.SerializeToString())


def calibration_images(export: Export, data: ImageData) -> Iterator[Tensor]:
    """Yields training images as the file takes them, prepared as for evaluation."""
    count = 0
    for batch in data.evaluation_dataloader("train"):
        data.finish(batch)
        images = batch["image"]
        for one in [x[None] for x in images] if isinstance(images, list) else [images]:  # of several sizes
            yield export.from_normalised(one)
            count += len(one)
        if count >= CALIBRATION:
            return


@torch.no_grad()
def score(task: Task, export: Export, run: RunFile, data: ImageData) -> float:
    """Returns what `linvit test` calls the score, of a file in place of the task's network."""

    def network(images: Tensor, full_size: bool = True) -> Any:  # of segmentation, which the file's logits have
        return run(export.from_normalised(images))

    metrics: Any = task.configure_metrics()
    for batch in data.evaluation_dataloader(data.data_source.evaluated({*data.splits, "val"})):
        data.finish(batch)
        task.score_batch(cast("nn.Module", network), batch, metrics)
    return float(metrics[task.score_metric].compute())
