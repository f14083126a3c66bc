"""`linvit export`: what a file says, that it computes what the network computes, and what is refused."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import onnx
import pytest
import torch

import linvit as package
from linvit.errors import UserError
from linvit.heads.detection.detector import create_detector
from linvit.heads.segmentation.base import SegmentationHead
from linvit.heads.segmentation.segmentor import create_segmentor
from linvit.inference.description import ModelDescription, build_network, read_trained
from linvit.inference.export import Export
from linvit.registry import heads
from linvit.testing.numbers import disturb, relative_error
from linvit.testing.onnx import in_onnxruntime
from tests.cli.runs import linvit
from tests.families import narrow, small
from tests.helpers import own_names

SOURCE = str(Path(package.__file__).parent).encode()  # of this machine: no file shall name it


def test_a_file_takes_pixels_of_any_size_and_says_what_its_classes_are(run, tmp_path):
    done = linvit("export", run.folder, "model.onnx", "--with_preprocessing", "--skip_latency", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "for any batch and any size. Takes images (uint8, 0 to 255), gives logits" in " ".join(done.out.split())
    assert [line.split()[:3] for line in done.out.splitlines()[-4:]][1] == ["5", "x", "64x32"]
    content = (tmp_path / "model.onnx").read_bytes()
    assert SOURCE not in content
    said = {entry.key: entry.value for entry in onnx.load_from_string(content).metadata_props}
    assert json.loads(said["class_names"]) == list("0123456789")
    description, state = read_trained(run.folder)
    assert json.loads(said["description"]) == json.loads(json.dumps(description.as_dict()))
    pixels = torch.randint(256, (3, 3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    mean, std = (torch.tensor(description.preprocessing[name]).view(-1, 1, 1) for name in ("mean", "std"))
    want = build_network(description, state, run.folder)((pixels / 255 - mean) / std)
    torch.testing.assert_close(in_onnxruntime(content)(pixels)[0], want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_a_run_that_is_not_finished_is_refused(run, tmp_path):
    folder = tmp_path / "quickstart" / "version_0"
    shutil.copytree(run.folder, folder)
    rows = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(rows[:3]), encoding="utf-8")
    done = linvit("export", folder, "model.onnx", cwd=tmp_path)
    assert done.code == 2
    assert "is not finished" in done.err
    assert f"or name the checkpoint to export, such as {folder / 'checkpoints' / 'best.ckpt'}" in done.err
    assert not (tmp_path / "model.onnx").exists()
    (folder / "checkpoints" / "best.ckpt").unlink()  # as before the first evaluation
    assert f"such as {folder / 'checkpoints' / 'last.ckpt'}" in linvit("export", folder, "model.onnx", cwd=tmp_path).err
    (folder / "checkpoints" / "last.ckpt").unlink()
    assert "such as" not in linvit("export", folder, "model.onnx", cwd=tmp_path).err


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.pb", "a network is exported as FILE.onnx or FILE.pt2 (torch.export); got 'model.pb'"),
        ("there.onnx", "'there.onnx' exists; remove it, or choose another name"),
        ("nowhere/model.onnx", "there is no folder 'nowhere'"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(file, message, run, tmp_path):
    (tmp_path / "there.onnx").touch()
    done = linvit("export", run.folder, file, cwd=tmp_path)
    assert (done.code, done.err.strip()) == (2, f"linvit: error: {message}")


def test_without_the_extra_it_says_how_to_install_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    done = linvit("export", run.folder, "model.onnx", cwd=tmp_path)
    assert done.code == 2
    assert "pip install 'linvit[export]'" in done.err


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(name, marks=[] if name == "linear" else pytest.mark.slow)
        for name in own_names(heads)
        if issubclass(heads.get(name), SegmentationHead)
    ],
)
def test_a_segmentor_with_every_head_is_right_at_every_size_and_gives_logits_of_that_size(head, tmp_path):
    backbone, odd = small("pvt_v2_b0"), (75, 130)
    if head == "linear":  # quick
        backbone, odd = {"name": "deit_nano", "embed_dim": 24, "depth": 1}, (76, 132)
    segmentor = create_segmentor(backbone, narrow(head), 3, img_size=64).eval()
    disturb(segmentor)
    export = Export(segmentor, ModelDescription("0", "linvit.tasks:SegmentationTask", {"img_size": 64}))
    assert not export.fixed
    run = export.write(tmp_path / "model.onnx")
    cases = export.compare(run)
    assert [(batch, size) for batch, size, _ in cases] == [(1, (64, 64)), (5, (96, 64)), (1, (64, 128)), (5, (96, 128))]
    assert max(case.error for case in cases) <= 1e-5
    images = export.images(3, odd)
    assert relative_error(run(images), segmentor(images)) <= 1e-5


def test_a_detector_is_refused():
    detector = create_detector(small("pvt_v2_b0"), narrow("retinanet"), 2, img_size=64).eval()
    description = ModelDescription("0", "linvit.tasks:DetectionTask", {"img_size": 64, "num_classes": 2})
    with pytest.raises(UserError, match="a detector cannot be exported"):
        Export(detector, description)


@pytest.mark.slow
def test_a_program_of_torch_export_in_half_precision(run, tmp_path):
    done = linvit("export", run.folder, "model.pt2", "--dtype", "float16", "--skip_latency", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    said = {"description.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=said).module()
    assert program(torch.zeros(3, 3, 40, 48)).shape == (3, 10)
    with zipfile.ZipFile(tmp_path / "model.pt2") as file:
        assert not any(SOURCE in file.read(name) for name in file.namelist())
    assert json.loads(json.loads(said["description.json"])["class_names"]) == list("0123456789")


@pytest.mark.slow
def test_eight_bits_keep_the_attention_in_float_and_the_score(run, tmp_path):
    done = linvit("export", run.folder, "model.onnx", "--int8", "--skip_latency", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    before, after = map(float, re.findall(r"0\.\d{4}", done.out.rpartition("8 bits")[2]))
    assert abs(before - after) <= 0.02
    graph = onnx.load(tmp_path / "model.onnx").graph
    restored = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    assert {len(restored & {*node.input[:2]}) for node in products} == {0, 2}
