"""`linvit export`: what a file says, that it computes what the network computes, and what is refused."""

import json
import shutil
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import onnx
import pytest
import torch

import linvit as package
from linvit.errors import UserError
from linvit.heads.create import heads_of
from linvit.heads.detection.detector import create_detector
from linvit.heads.segmentation.base import SegmentationHead
from linvit.heads.segmentation.segmentor import create_segmentor
from linvit.inference.description import ModelDescription, build_task, read_trained
from linvit.inference.export import Export
from linvit.inference.onnx import in_onnxruntime
from linvit.registry import heads
from linvit.testing.numbers import disturb, relative_error
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
    assert json.loads(said["description"]) == json.loads(json.dumps(asdict(description)))
    pixels = torch.randint(256, (3, 3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    mean, std = (torch.tensor(description.preprocessing[name]).view(-1, 1, 1) for name in ("mean", "std"))
    want = build_task(description, state, run.folder).network((pixels / 255 - mean) / std)
    torch.testing.assert_close(in_onnxruntime(content)(pixels)[0], want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_a_run_that_is_not_finished_is_refused(run, tmp_path):
    folder = tmp_path / "quickstart" / "version_0"
    shutil.copytree(run.folder, folder)
    (folder / "result.json").unlink()
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
        ("there.onnx", "'there.onnx' exists: name another file, or remove it first"),
        ("nowhere/model.onnx", "cannot write 'model.onnx': the folder 'nowhere' does not exist. Create it first"),
        pytest.param(
            "/proc/model.onnx",
            "cannot write to the output folder '/proc': '/proc': No such file or directory. Choose another one with "
            "the path of 'model.onnx'",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc"),
        ),
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
    assert [(batch, size) for batch, size, *_ in cases] == [
        (1, (64, 64)),
        (5, (96, 64)),
        (1, (64, 128)),
        (5, (96, 128)),
    ]
    assert max(case.error for case in cases) <= 1e-5
    images = export.images(3, odd)
    assert relative_error(run(images), segmentor(images)) <= 1e-5


def small_detector(head):
    """One with some detections in noise."""
    torch.manual_seed(0)
    spec = narrow(head) | {"score_threshold": 0.2}
    spec |= {"candidates": 30} if head == "retinanet" else {"candidates": [30, 20]}
    detector = create_detector({"name": "timm", "model": "test_resnet"}, spec, 3, img_size=160).eval()
    for layer in detector.head.classifiers():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    if head != "retinanet":  # proposals of scores at which onnxruntime's sigmoid is flat
        torch.nn.init.kaiming_normal_(detector.head.rpn.conv.weight)
        torch.nn.init.normal_(detector.head.rpn.classifier.weight)
        torch.nn.init.constant_(detector.head.rpn.classifier.bias, -30)
    for weight in (weight for name, weight in detector.head.named_parameters() if "tower" in name and weight.ndim > 1):
        torch.nn.init.kaiming_normal_(weight)
    return detector


def detector_export(detector, dtype="float32"):
    return Export(detector, ModelDescription("0", "linvit.tasks:DetectionTask", {"img_size": 160}), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model.onnx", "model.pt2"])
@pytest.mark.parametrize("head", heads_of("detection"))
def test_a_detector_finds_the_same_in_its_file_at_every_size(head, file, tmp_path):
    detector = small_detector(head)
    export = detector_export(detector)
    run = export.write(tmp_path / file)
    cases = export.compare(run)
    sizes = [(160, 160), (181, 160), (160, 202), (181, 202)]  # also to be padded
    assert [(batch, size) for batch, size, *_ in cases] == list(zip([1, 5, 1, 5], sizes, strict=True))
    assert all(case.detections for case in cases)
    assert max(case.error for case in cases) <= 1e-5
    shapes = [tuple(x.shape) for x in run(export.images(3, (160, 160)))]
    assert shapes == [(3,), (3, 10, 4), (3, 10), (3, 10), (3, 10, 28, 28)][: len(export.outputs)]
    if file.endswith("onnx"):
        operators = [node.op_type for node in onnx.load(tmp_path / file).graph.node]
        assert operators.count("NonMaxSuppression") == (1 if head == "retinanet" else 2)
        assert [output.name for output in onnx.load(tmp_path / file).graph.output] == export.outputs


def test_the_comparison_of_a_detector_sees_a_wrong_file():
    export = detector_export(small_detector("retinanet"))
    with torch.no_grad():
        assert max(case.error for case in export.compare(lambda images: wrong(export, images, 0))) == 0
        assert min(case.error for case in export.compare(lambda images: wrong(export, images, 1))) >= 0.003


def wrong(export, images, pixels):
    """A file's outputs, the first box of which is larger by so many pixels."""
    found = export.network.detect_batch(images)
    found["boxes"][:, 0, 2] += pixels
    return list(found.values())


def test_a_detector_in_half_precision_is_refused():
    with pytest.raises(UserError, match="detectors can only be exported in float32"):
        detector_export(small_detector("retinanet"), dtype="float16")


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
