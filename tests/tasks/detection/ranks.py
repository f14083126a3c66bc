"""Scores its part of the images, by `python -m tests.tasks.detection.ranks FOLDER RANK WORLD`."""

import json
import sys
from pathlib import Path

from torch import distributed

from tests.tasks.detection.squares import finder_task
from tests.tasks.detection.test_task import figures

if __name__ == "__main__":
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    distributed.init_process_group("gloo", f"file://{folder}/store{world}", rank=rank, world_size=world)
    rows = [*range(rank, 12, world), *([0] if rank else [])]
    found = figures(finder_task().eval(), rows)
    (folder / f"{world}_{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()
