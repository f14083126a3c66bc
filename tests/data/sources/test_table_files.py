"""Files of tables that are malformed on purpose."""

import json
import os
import struct

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from linvit import UserError
from linvit.data import ClassificationData
from linvit.data.sources.splits import load_splits
from linvit.data.sources.stream import load_streams
from tests.data.images import plain_table

ROW = {"image": [{"bytes": b"x", "path": None}], "label": [0]}


def features(kind):
    return json.dumps({"info": {"features": {"label": kind}}}).encode()


METADATA = {  # what `datasets` keeps in a table: the content, and what is said of it
    "no JSON": (b"{", "cannot read the data"),
    "brackets": (b"[" * 100_000, "cannot read the data"),
    "unknown feature": (features({"_type": "os.system", "command": "x"}), "cannot read the data"),
}


def write(path, metadata=None):
    table = pa.table(ROW)
    table = table if metadata is None else table.replace_schema_metadata({b"huggingface": metadata})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_malformed_metadata(tmp_path, suffix, name):
    path = tmp_path / f"train.{suffix}"
    write(path, METADATA[name][0])
    for door in (load_splits, load_streams):
        with pytest.raises(UserError, match=METADATA[name][1]):
            door(str(path))


def test_an_arrow_file_that_points_outside_of_itself(tmp_path):
    table = pa.table({"image": [b"12345", b"123456"]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    data = (tmp_path / "x.arrow").read_bytes()
    offsets = struct.pack("<3i", 0, 5, 11)
    assert offsets in data
    (tmp_path / "x.arrow").write_bytes(data.replace(offsets, struct.pack("<3i", 0, 2**30, 11)))
    with pytest.raises(UserError, match="cannot read the data"):
        load_splits(str(tmp_path / "x.arrow"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in this file system")
def test_a_pipe_is_no_table(tmp_path):
    os.mkfifo(tmp_path / "x.parquet")
    for source in (tmp_path, tmp_path / "x.parquet"):
        with pytest.raises(UserError, match="regular file"):
            load_splits(str(source))


def test_a_saved_set_whose_parts_lie_at_an_address(tmp_path):
    datasets.DatasetDict(train=datasets.Dataset.from_dict(ROW)).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "zip://x::http://127.0.0.1:9/x"]}')
    with pytest.raises(UserError, match=r"dataset_dict.json' names an address"):
        load_splits(str(tmp_path / "saved"))


def test_a_stream_that_breaks_off(tmp_path):
    path = plain_table(tmp_path / "x.parquet", label=[0] * 10)
    content = path.read_bytes()
    path.write_bytes(bytes(64) + content[64:])  # its table of contents, at its end, is sound
    data = ClassificationData(str(path), num_classes=2, streaming=True, img_size=8, num_workers=0)
    data.setup("predict")
    with pytest.raises(UserError, match="cannot read the data at"):
        list(data.predict_dataloader())
