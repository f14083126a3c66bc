"""How far the package is from its references: every golden file with the largest errors of output and gradients.

Runs the tests that hold the package to the files and writes down what they compare, in float32. An error is the largest
absolute one over the largest absolute value of the file's tensors of that kind. Files without parameters, or whose
parameters' gradients are not kept, have no such error; running statistics are in files of a step of training.

Example:
    $ python benchmarks/golden_errors.py mech_ > errors.md
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.golden_files import FOLDER, Golden  # noqa: E402

KINDS = ("output", "grad_input", "grad_param", "after")


class GoldenTests:
    """Picks the tests that take a golden file whose name begins as asked."""

    def __init__(self, start: str) -> None:
        self.start = start

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the others out."""
        given = [(item, getattr(item, "callspec", None)) for item in items]
        golden = [(item, spec.params.get("golden")) for item, spec in given if spec is not None]
        items[:] = [item for item, file in golden if file is not None and file.name.startswith(self.start)]


def main() -> None:
    """Prints a line of a Markdown table for each file whose name begins as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", nargs="?", default="", help="beginning of the names: mech_ for attention mechanisms")
    start = parser.parse_args().start
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    compare = Golden.check

    def check(golden: Golden, name: str, got: Tensor) -> None:
        kind = next((kind for kind in KINDS if name.startswith(kind)), name)
        if got.dtype == torch.float32:
            error = (got.detach().double() - golden.tensors[name].double()).abs().max()
            scale = max(golden.tensors[other].abs().max() for other in golden.named(kind))
            errors[golden.name][kind] = max(float(error / scale), errors[golden.name].get(kind, 0.0))
        compare(golden, name, got)

    Golden.check = check  # type: ignore[method-assign]
    folders = [
        str(ROOT / "tests" / name)
        for name in ("attention", "layers", "backbones", "heads", "weights", "tasks/segmentation")
    ]
    code = pytest.main(["-q", "-W", "ignore", *folders], plugins=[GoldenTests(start)])
    print("| file | output | gradient of inputs | of parameters | running statistics |\n|---|---|---|---|---|")
    for file in sorted(path.stem for path in FOLDER.glob(f"{start}*.safetensors")):
        shown = (f"{errors[file][kind]:.1e}" if kind in errors[file] else "-" for kind in KINDS)
        print(f"| {file} | {' | '.join(shown)} |")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
