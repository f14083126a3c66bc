"""`make gallery` on a tiny grid."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--attention=softmax,xca", "--epochs=1", "--seeds=1", "--grids=4,8", "--budget=1", "--output=gallery"]


@pytest.mark.slow
def test_it_writes_the_table_and_the_pictures(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gallery.py", *TINY]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    folder = tmp_path / "gallery"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "| softmax |  | 0." in text
    pictures = {line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")}
    assert {path.name for path in folder.iterdir()} == {"README.md", *pictures}
    assert "UTC" in (folder / "score_over_latency.svg").read_text(encoding="utf-8")
