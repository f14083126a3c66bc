"""How fast checkpoints are written, verified and loaded: `python benchmarks/checkpoint_speed.py [GIGABYTES]`."""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from linvit.callbacks.save_checkpoints import AtomicCheckpointIO
from linvit.weights import torch_file


def main() -> None:
    """Prints GB/s, the median of five."""
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    content = {"state_dict": {f"w{i}": torch.randn(2**22) for i in range(round(size * 1e9 / 2**24))}}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder, "x.ckpt")
        ways: dict[str, Callable[[], object]] = {
            "torch.save": lambda: torch.save(content, path),
            "Lightning writes": lambda: TorchCheckpointIO().save_checkpoint(content, path),
            "linvit writes": lambda: AtomicCheckpointIO().save_checkpoint(content, path),
            "verify": lambda: torch_file.check_archive(path),
            "torch.load": lambda: torch.load(path, weights_only=True),
            "verify and load": lambda: torch_file.load(path),
        }
        for name, way in ways.items():
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - start)
            print(f"{name:18} {path.stat().st_size / sorted(seconds)[2] / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
