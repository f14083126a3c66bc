"""What a file says of the network in it, and the network that is built from that."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from linvit.errors import UserError
from linvit.inference.description import ModelDescription, build_task, read_trained, write_trained
from linvit.tasks import ClassificationTask
from tests.second_task.task import InkTask
from tests.training import SIDE, TINY

PREPROCESSING = {
    **{"size": [16, 16], "crop_mode": "center", "crop_pct": 1.0},
    **{"mean": [0.305, 0.305, 0.305], "std": [0.376, 0.376, 0.376], "bands": None, "value_range": None},
    **{"exif_orientation": True, "max_pixels": 89478485},
}


def test_a_checkpoint_says_how_to_predict(run):
    description, state = read_trained(run.folder)
    assert description.task == "linvit.tasks.classification:ClassificationTask"
    assert description.class_names == list("0123456789")
    assert description.options["backbone"] == {"name": "deit_nano", "depth": 1}
    assert description.weights == "raw"
    assert not {"lr", "pretrained", "teacher", "ema_decay"} & description.options.keys()
    preprocessing = description.preprocessing
    assert preprocessing["size"] == list(
        torch.Size(ClassificationTask.load_from_checkpoint(run.checkpoint("best")).example_images.shape[2:])
    )
    assert preprocessing.keys() == PREPROCESSING.keys()
    assert ModelDescription.from_dict(json.loads(json.dumps(asdict(description))), "JSON") == description
    network = build_task(description, state, run.folder).network
    task = ClassificationTask.load_from_checkpoint(run.checkpoint("best")).eval()
    images = torch.randn(2, *task.example_images.shape[1:])
    assert torch.equal(network(images), task.network(images))


def test_a_network_that_was_trained_with_mesa_needs_no_moving_average(run, tmp_path):
    content = torch.load(run.checkpoint("best"), weights_only=True)
    content["hyper_parameters"] |= {"ema_decay": 0.9, "mesa": 1.0}
    torch.save(content | {"ema_updates": 0}, tmp_path / "best.ckpt")
    description, state = read_trained(tmp_path / "best.ckpt")
    build_task(description, state, "FILE")
    assert description == read_trained(run.folder)[0]


def test_each_kind_of_weights_is_that_of_its_own_best_epoch(run, tmp_path):
    predict_with = "ema"
    content, files = torch.load(run.checkpoint("best"), weights_only=True), {"best": (1, 2), "best_ema": (3, 4)}
    names = [name.removeprefix("network.") for name in content["state_dict"] if name.startswith("network.")]
    content |= {"ema_updates": 20, "hyper_parameters": content["hyper_parameters"] | {"ema_decay": 0.9}}
    (tmp_path / "checkpoints").mkdir()
    for file, values in files.items():  # written before somebody resumed the run with the other kind
        kinds = zip(("network.", "ema.network."), values, strict=True)
        state = {f"{kind}{name}": torch.full((1,), value) for kind, value in kinds for name in names}
        torch.save(content | {"state_dict": state}, tmp_path / "checkpoints" / f"{file}.ckpt")
    config = {"model": {"init_args": {"predict_with": predict_with}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    for weights in ("raw", "ema", None):
        description, state = read_trained(tmp_path, weights)
        assert description.weights == (weights or predict_with)
        assert {tensor.item() for tensor in state.values()} == {{"raw": 1, "ema": 4}[weights or predict_with]}


def test_a_file_of_weights_says_the_same(run, tmp_path):
    description, state = read_trained(run.folder)
    write_trained(tmp_path / "model.safetensors", build_task(description, state, run.folder).network, description)
    again, weights = read_trained(tmp_path / "model.safetensors")
    assert again == description
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": "os:system"}, "the task 'os:system' is not linvit's"),
        ({"options": {"backbone": "antigravity:fly"}}, "would run its code"),
        ({"options": {"attention": "of_a_plug_in"}}, "no attention is called 'of_a_plug_in'"),
        ({"options": {"backbone": {"name": "deit_nano", "depth": 40}}}, "belongs to another model"),
        ({"version": "999.0", "options": {"foo": 1}}, "linvit 999.0 wrote it, and this is .* takes its weights alone"),
    ],
)
def test_nothing_is_built_that_is_not_registered(change, said):
    task = ClassificationTask(backbone=TINY, num_classes=2, img_size=SIDE)
    options = {"backbone": TINY, "num_classes": 2, "img_size": SIDE} | change.get("options", {})
    description = ModelDescription("0.1", "linvit.tasks.ClassificationTask", options)
    with pytest.raises(UserError, match=said):
        build_task(replace(description, **{**change, "options": options}), task.network.state_dict(), "FILE")


DESCRIBED = {"version": "1", "task": "x", "weights": "raw", "preprocessing": None}


@pytest.mark.parametrize(
    "content",
    [
        *([], {"version": 1}, {**DESCRIBED, "options": {"a": object()}}, {**DESCRIBED, "options": {"class_names": 5}}),
        {**DESCRIBED, "options": {"class_names": ["a"], "num_classes": 2}},
        {**DESCRIBED, "options": {"class_names": [1, 2], "num_classes": 2}},
    ],
)
def test_what_is_no_description_is_refused(content):
    with pytest.raises(UserError, match="'FILE' does not describe a trained network"):
        ModelDescription.from_dict(content, "FILE")


def test_a_third_party_task_is_one_that_is_imported_or_allowed():
    task = InkTask(backbone=TINY, num_classes=2, img_size=SIDE)
    options = {"backbone": TINY, "num_classes": 2, "img_size": SIDE}
    description = ModelDescription("0.1", "tests.second_task.task:InkTask", options)
    assert isinstance(build_task(description, task.network.state_dict(), "FILE"), InkTask)
    with pytest.raises(UserError, match="--allow=other:InkTask"):
        build_task(replace(description, task="other:InkTask"), task.network.state_dict(), "FILE")
