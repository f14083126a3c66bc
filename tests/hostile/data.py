"""Hostile data sets."""

import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from linvit.cli import main
from linvit.data import ClassificationData
from tests.cli.runs import QUICKSTART, tiny
from tests.data.coco import SIZES, annotation, write_coco, write_json
from tests.data.damaged import bomb, encoded, photo
from tests.data.images import image_folder, png

Door = Callable[[Path, str], object]
ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def folders(root: Path, mark: Path) -> Iterator[Path]:
    """Folders of images, one of which is hostile, or a name is."""
    webp, wide, alike = io.BytesIO(), io.BytesIO(), io.BytesIO()
    Image.new("RGB", (9000, 9000), "red").save(webp, "WEBP", quality=1, method=0)
    Image.new("RGB", (9400, 9400)).save(wide, "JPEG2000")
    Image.new("RGBA", (9400, 9400)).save(alike, "PNG", compress_level=1)
    eps = encoded(photo(0), "EPS").replace(b"%%EndComments", f"%%EndComments\n(%pipe%touch {mark}) (w) file".encode())
    images: dict[str, bytes | Callable[[Path], object]] = {
        "pipe.jpg": os.mkfifo,
        "zero.jpg": lambda path: path.symlink_to("/dev/zero"),
        "terminal.jpg": lambda path: path.symlink_to("/dev/tty"),
        "folder.jpg": lambda path: path.mkdir(),
        "sparse.jpg": lambda path: (path.touch(), os.truncate(path, 2**42)),
        "eps.jpg": eps,
        "webp_80_megapixels.jpg": webp.getvalue(),
        "jpeg_2000.jpg": wide.getvalue(),
        "png_88_megapixels.png": alike.getvalue(),
        "png_bomb.png": bomb(20_000, 10_000),
        "strip.png": bomb(1_000_000, 2),
        "garbage.gif": b"GIF89a" + os.urandom(1000),
        "huge_tiff.tif": b"II*\0\x08\0\0\0" + struct.pack("<H", 65535) + os.urandom(5000),
        "metadata.csv": os.mkfifo,
        "metadata.jsonl": b'{"file_name": "http://ADDRESS/x.jpg", "label": 1}\n',
        "x.zip": b"PK\x03\x04 and no more",
        f"{ESCAPE}.jpg": b"no image",
    }
    for name, content in images.items():
        folder = root / f"folder-{name.translate({27: 'e', 7: 'b'})}"
        image_folder(folder, ["train", "val", "test"])
        for split in ("train", "val", "test"):
            path = folder / split / "ant" / name
            content(path) if callable(content) else path.write_bytes(content)
        yield folder
    yield image_folder(root / "escape_class", ["train", "val", "test"], (ESCAPE, "bee"))


def tables(root: Path, address: str) -> Iterator[Path]:
    """Files of tables with hostile cells, labels or headers."""
    images = [{"bytes": png(photo(seed)), "path": None} for seed in range(12)]
    labels = [0, 1] * 6
    host = address.partition("://")[2]
    paths = [
        f"{address}/x.jpg",
        f"reference::{address}/x",
        f"zip://a.jpg::{address}/x.zip",
        f"simplecache::{address}/x.jpg",
        f"hf://datasets/a/b/x.jpg::{address}/x",
        f"ftp://{host}/x.jpg",
        f"github://a:b@{host}/x",
        "file:///etc/passwd",
        "/dev/zero",
        f"reference:///{root}/reference.json",
    ]
    contents: dict[str, dict[str, list[Any]]] = {
        **{f"path-{i}": {"image": [path] * 12, "label": labels} for i, path in enumerate(paths)},
        **{
            f"struct-{i}": {"image": [{"bytes": None, "path": path}] * 12, "label": labels}
            for i, path in enumerate(paths)
        },
        "label_10_9": {"image": images, "label": [0, 10**9] * 6},
        "label_2_62": {"image": images, "label": [0, 2**62] * 6},
        "label_negative": {"image": images, "label": [0, -1] * 6},
        "label_float": {"image": images, "label": [0.5, float("nan")] * 6},
        "label_null": {"image": images, "label": [None, 1] * 6},
        "label_bytes": {"image": images, "label": [b"\xff", b"\0"] * 6},
        "label_list": {"image": images, "label": [[0], [1]] * 6},
        "label_escape": {"image": images, "label": [ESCAPE, "a"] * 6},
    }
    for name, content in contents.items():
        for suffix in ("parquet", "arrow"):
            path = root / f"{name}.{suffix}"
            _write(path, pa.table(content))
            yield path
    plain = pa.table({"image": images, "label": labels})
    headers = {
        "no_json": b"{",
        "brackets": b"[" * 100_000,
        "number": b"1",
        "list": b"[]",
        "info": b'{"info": []}',
        "features": b'{"info": {"features": 3}}',
        "feature": b'{"info": {"features": {"label": {"_type": "os.system"}}}}',
        "binary": bytes(range(256)),
    }
    for name, header in headers.items():
        for suffix in ("parquet", "arrow"):
            _write(root / f"header-{name}.{suffix}", plain.replace_schema_metadata({b"huggingface": header}))
            yield root / f"header-{name}.{suffix}"
    for kind in ("parquet", "arrow"):
        _write(root / f"whole.{kind}", plain)
        data = (root / f"whole.{kind}").read_bytes()
        for sixteenth in range(0, 16, 3):
            cut = len(data) * sixteenth // 16
            for name, part in {"cut": data[:cut], "zeros": data[:cut] + bytes(64) + data[cut + 64 :]}.items():
                (root / f"{name}-{sixteenth}.{kind}").write_bytes(part)
                yield root / f"{name}-{sixteenth}.{kind}"
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"label": labels})).save_to_disk(root / "saved_address")
    (root / "saved_address" / "dataset_dict.json").write_text(json.dumps({"splits": [f"zip://x::{address}/x.zip"]}))
    yield root / "saved_address"
    for file in ("state.json", "dataset_info.json"):
        saved = root / f"saved_{file}"
        datasets.Dataset.from_dict({"label": labels}).save_to_disk(saved)
        (saved / file).write_text("[" * 100_000)
        yield saved
    os.mkfifo(root / "pipe.parquet")
    yield root / "pipe.parquet"
    (root / "zero.arrow").symlink_to("/dev/zero")
    yield root / "zero.arrow"
    (root / "garbage.tar").write_bytes(os.urandom(2000))
    yield root / "garbage.tar"
    with tarfile.open(root / "outside.tar", "w") as archive:
        for name in ("../../x.jpg", "/etc/x.jpg", "x.pickle", "x.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    yield root / "outside.tar"
    with zipfile.ZipFile(root / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.jpg", bytes(10**8))
    yield root / "bomb.zip"


def annotations(root: Path) -> Iterator[Path]:
    """Folders with COCO's files, of which that of train is hostile."""
    ring = [0, 0, 8999, 0, 8999, 8999, 0, 8999]
    large = dict.fromkeys(SIZES, (9000, 9000))
    contents: dict[str, dict[str, Any]] = {
        "digits": {"info": {"year": 0}},
        "categories": {"categories": [{"id": key, "name": f"c{key}"} for key in range(100_000)]},
        "polygons": {"found": [annotation(key, 5, segmentation=[ring] * 2000) for key in range(20)], "sizes": large},
        "escape": {"categories": [{"id": 1, "name": ESCAPE}], "found": [annotation(1, 5)]},
        "words": {"found": [annotation(key, 5, "1") | {"bbox": [ESCAPE] * 4, "id": ESCAPE} for key in range(20)]},
        "huge": {"found": [annotation(1, 5) | {"bbox": [0, 0, 10**400, 1e300]}]},
        "runs": {"found": [annotation(1, 5, segmentation={"size": [48, 64], "counts": [2**62, -(2**62)]})]},
        "nested": {"found": [annotation(1, 5, segmentation=[[[[1]]]])]},
    }
    for name, content in contents.items():
        write_coco(root / name, ("train",))
        file = write_json(root / name / "annotations" / "instances_train2017.json", **content)
        file.write_text(file.read_text().replace('"year": 0', '"year": ' + "1" * 6000), encoding="utf-8")
        yield root / name


def _write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def _load(path: Path, address: str, streaming: bool = False) -> None:
    """From Python: all samples of training, or all that a stream has."""
    options: dict[str, Any] = {"img_size": 32, "num_workers": 0, "batch_size": 4, "streaming": streaming}
    data = ClassificationData(str(path), **options, num_classes=2 if streaming else None)
    data.setup("predict" if streaming else "fit")
    for _ in data.predict_dataloader() if streaming else data.train_dataloader():
        pass


def _verb(verb: str) -> Door:
    def run(path: Path, address: str) -> object:
        weights = [] if verb == "fit" else ["--untrained"]
        return main([verb, f"--config={QUICKSTART}", *tiny(data__source=path, data__num_workers=0), *weights])

    return run


ANNOTATION_DOORS: dict[str, Door] = {
    f"linvit data check{' --masks' * masks}, objects": lambda path, address, masks=masks: main(  # type: ignore[misc]
        ["data", "check", str(path), "--workers", "0", "--output", "bad.csv", *["--masks"] * masks]
    )
    for masks in (False, True)
}
DOORS: dict[str, Door] = {
    "ClassificationData": _load,
    "ClassificationData, stream": lambda path, address: _load(path, address, streaming=True),
    "linvit data check": lambda path, address: main(
        ["data", "check", str(path), "--workers", "0", "--output", "bad.csv"]
    ),
    **{f"linvit {verb}": _verb(verb) for verb in ("fit", "validate", "test", "predict")},
}
