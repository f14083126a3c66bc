"""How long a loader takes to resume in the middle of an epoch: `python benchmarks/resume_position.py [SAMPLES]`.

Prints the seconds until the first batch at the start of an epoch and after so many samples, by kind of data: a table
that is read at random, the same parquet files as a stream, and tar files, which do not contain their number of rows.
"""

import io
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from linvit.data import ClassificationData

BATCH = 100
MORE = 1000  # samples after those that are skipped
SHARDS = 4


def picture() -> bytes:
    """A small PNG file of noise, about 9 kB."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)).save(file, "png")
    return file.getvalue()


def write(folder: Path, kind: str, samples: int) -> None:
    """Writes parquet or tar files of both splits."""
    content = picture()
    datasets.disable_progress_bars()
    names = [(f"train-{shard:05}-of-{SHARDS:05}", samples // SHARDS) for shard in range(SHARDS)]
    for shard, (name, rows) in enumerate([*names, ("validation-00000-of-00001", BATCH)]):
        path = folder / f"{name}.{kind}"
        if kind == "tar":
            with tarfile.open(path, "w") as tar:
                for row in range(rows):
                    for suffix, data in (("png", content), ("cls", b"0")):
                        member = tarfile.TarInfo(f"{shard}_{row:07}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
        else:
            features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
            images = [{"bytes": content, "path": None}] * rows
            table = datasets.Dataset.from_dict({"image": images, "label": [0] * rows}, features=features)
            table.to_parquet(path, batch_size=1000)


def seconds(source: Path, samples: int, skip: int, streaming: bool, tar: bool) -> float:
    """Seconds until the first batch after some samples."""
    columns = {"image_column": "png", "label_column": "cls"} if tar else {}
    data = ClassificationData(
        source=str(source),
        img_size=32,
        batch_size=BATCH,
        num_workers=0,
        streaming=streaming,
        streaming_rows=samples if tar else None,
        num_classes=2 if tar else None,
        **columns,
    )
    data.setup("fit")
    loader = data.train_dataloader()
    loader.load_state_dict({"epoch": 0, "samples": skip, "order": loader.order.identity})
    start = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - start


def main() -> None:
    """Prints a line per kind of data."""
    skip = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    samples = skip + MORE
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for kind in ("parquet", "tar"):
            source = Path(folder, kind)
            source.mkdir()
            write(source, kind, samples)
            for streaming in (False, True) if kind == "parquet" else (True,):
                at = [seconds(source, samples, done, streaming, kind == "tar") for done in (0, skip)]
                name = f"{kind}, streamed" if streaming else kind
                print(f"{name:18} {at[0]:.2f} s at the start, {at[1]:.2f} s after {skip:,} samples", flush=True)


if __name__ == "__main__":
    main()
