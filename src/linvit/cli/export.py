"""`linvit export`: writes a trained network as an ONNX file or torch.export program, and compares it with torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linvit.errors import UserError
from linvit.experiments.measure import interleaved
from linvit.finite import worst
from linvit.inference.description import build_task, read_trained
from linvit.inference.export import SUFFIXES, TOLERANCE, Export, RunFile
from linvit.inference.onnx import OPSET, require
from linvit.io.files import check_new_file
from linvit.io.machine import has_compiler
from linvit.io.terminal import argument_parser, reflow, table
from linvit.runs.folder import check_finished

EPILOG = """examples:
  linvit export RUN model.onnx                the best weights of a run
  linvit export RUN/checkpoints/last.ckpt model.onnx
  linvit export RUN model.onnx --with_preprocessing
                                              takes pixels from 0 to 255
  linvit export RUN model.pt2                 for torch.export.load

Batch size, height and width are dynamic where the network allows it.
The file's metadata has class names and preprocessing. docs/guides/export.md
shows how to run it without linvit. ONNX needs: pip install 'linvit[export]'

exit code: 0, or 1 if the file differs from torch by more than 1e-5 (float16:
2e-2) at one of the sizes.
"""
BUDGET = 3.0  # seconds of timing


def main(argv: list[str]) -> int:
    """Runs `linvit export`; prints the error of the file and its latency; returns 1 if the error is too large."""
    parser = argument_parser("linvit export", __doc__, EPILOG)
    parser.add_argument("model", metavar="RUN", help="a run, one of its checkpoints, or a .safetensors of linvit")
    parser.add_argument("file", type=Path, metavar="FILE", help="output: NAME.onnx or NAME.pt2")
    parser.add_argument("--with_preprocessing", action="store_true", help="normalise pixels from 0 to 255 in the file")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32", help="(default: %(default)s)")
    parser.add_argument("--skip_latency", action="store_true", help="do not measure the latency")
    args = parser.parse_args(argv)
    if args.file.suffix not in SUFFIXES:
        raise UserError(f"a network is exported as FILE.onnx or FILE.pt2 (torch.export); got '{args.file}'")
    check_new_file(args.file)
    if args.file.suffix == ".onnx":
        require("onnx", "onnxscript", "onnxruntime")
    check_finished(Path(args.model), "export")
    description, state = read_trained(args.model)
    task = build_task(description, state, args.model)
    export = Export(task.network, description, args.with_preprocessing, args.dtype)
    run = export.write(args.file)
    kind = f"ONNX, opset {OPSET}" if args.file.suffix == ".onnx" else "a program of torch.export"
    size = f"images of {export.size[0]}x{export.size[1]} only, since {export.fixed}" if export.fixed else "any size"
    takes = f"Takes images ({export.metadata['images']}), gives {', '.join(export.outputs)}."
    print(reflow(f"{args.file}: {kind}, {export.dtype}, for any batch and {size}. {takes}"))
    cases = export.compare(run)
    rows = [("  images", "error", "detections" * export.is_detector)]
    for batch, (height, width), one, detections in cases:
        rows.append((f"  {batch} x {height}x{width}", f"{one:.0e}", str(detections) * export.is_detector))
    print("\n".join(table(rows)))
    error = worst(case.error for case in cases)
    if not error <= TOLERANCE[args.dtype]:
        print(f"the file differs from torch by {error:.0e}, more than {TOLERANCE[args.dtype]:.0e}")
        return 1
    if export.is_detector and not any(case.detections for case in cases):
        print("nothing was detected in these random images: the file is not compared with torch")
    if not args.skip_latency:
        print(reflow(latency(export, run)))
    return 0


@torch.no_grad()
def latency(export: Export, run: RunFile) -> str:
    """Times torch, compiled torch and the file in turns on one batch of the nominal size; returns a sentence."""
    images = export.images(export.cases[0][0], export.size)
    works: dict[str, Callable[[], Any]] = {"torch": lambda: export.exported(images)}
    if has_compiler():
        compiled = copy.deepcopy(export.exported)
        compiled.network.compile()  # for a detector, the backbone
        works["compiled torch"] = lambda: compiled(images)
    works["the file"] = lambda: run(images)
    found = interleaved(works, budget=BUDGET)
    times = ", ".join(f"{name} {1000 * timing.median:.3g}" for name, timing in found.items())
    size = f"{len(images)} x {export.size[0]}x{export.size[1]}"
    return f"milliseconds for {size}: {times} ({torch.get_num_threads()} threads)"
