"""Trained networks as folders that linvit, timm and transformers load, here and on a hub."""

import json
import re
import shutil

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import linvit
import linvit.backbones
from linvit.inference.description import ModelDescription, build_task, read_trained
from linvit.inference.hub import PATH, SECRET, public, push, timm_config, write_card
from linvit.runs.folder import RunFolder
from tests.cli.runs import linvit as command
from tests.hub import local_hub
from tests.inference.test_model import dense


def logits(network, images):
    with torch.no_grad():
        return network.eval()(images)


@pytest.fixture(scope="module")
def pushed(run, tmp_path_factory):
    """The folder that `linvit push --to` writes of the run, and what it prints."""
    folder = tmp_path_factory.mktemp("pushed")
    done = command("push", run.folder, "--to", "digits", "--license=apache-2.0", cwd=folder)
    assert done.code == 0, done.err
    return folder / "digits", done


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine in place of the real one."""
    with local_hub() as server:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        url = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


def test_the_same_logits_by_linvit_and_timm(run, pushed):
    folder, done = pushed
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert done.out == "wrote digits: README.md, config.json, model.safetensors\n"
    description, state = read_trained(run.folder)
    images = torch.randn(2, 3, 32, 32)
    expected = logits(build_task(description, state, run.folder).network, images)
    loaded = linvit.load(folder)
    assert loaded.description == description
    assert torch.equal(logits(loaded.network, images), expected)
    network = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(logits(network, images), expected)
    larger = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=48)  # its tables are resized
    torch.testing.assert_close(logits(larger, torch.ones(1, 3, 48, 48)), logits(network, torch.ones(1, 3, 48, 48)))
    data = timm.data.resolve_model_data_config(network)
    prepared = description.preprocessing
    assert [[*data["input_size"][1:]], data["mean"], data["crop_mode"]] == [
        list(prepared[name]) if name != "crop_mode" else prepared[name] for name in ("size", "mean", "crop_mode")
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == list("0123456789")
    assert "num_classes" not in config["model_args"]  # which transformers sets


def test_timm_prepares_images_as_the_run_does():
    network = timm.create_model("test_vit", num_classes=2)
    network.pretrained_cfg |= {"interpolation": "bilinear", "test_input_size": (3, 64, 64), "test_crop_pct": 1.0}
    options = {"crop_pct": 0.9, "crop_mode": "squash", "mean": [0.5] * 3, "std": [0.5] * 3}
    description = ModelDescription("0", "x:Y", {}, preprocessing={**options, "size": [32, 48]})
    network.pretrained_cfg = timm_config(network, description, "mit")["pretrained_cfg"]
    found = timm.data.resolve_data_config(model=network, use_test_size=True)
    assert found == {**options, "input_size": [3, 32, 48], "interpolation": "bicubic"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["segmentation_quickstart", "detection_quickstart"])
def test_networks_with_heads(name, tmp_path):
    """timm has no name for them; linvit loads them."""
    folder = dense(tmp_path, name)
    done = command("push", folder, "--to", "pushed", "--license=mit", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [*json.loads((tmp_path / "pushed" / "config.json").read_text())] == ["linvit"]
    assert "timm" not in (tmp_path / "pushed" / "README.md").read_text()
    image = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    found, expected = (vars(linvit.load(source)(image)) for source in (tmp_path / "pushed", folder))
    (result,) = {"mask", "objects"} & found.keys()
    np.testing.assert_equal(found[result], expected[result])


@pytest.mark.slow
def test_transformers(pushed):
    transformers = pytest.importorskip("transformers")
    images = torch.randn(2, 3, 32, 32)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(pushed[0])
    network = timm.create_model(f"local-dir:{pushed[0]}", pretrained=True)
    assert torch.equal(logits(loaded, images).logits, logits(network, images))


def test_the_card(run, pushed):
    text = (pushed[0] / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["license"] == "apache-2.0"
    assert head["pipeline_tag"] == "image-classification"
    config = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    resolved = RunFolder(run.folder).config
    assert config["model"] == resolved["model"]
    assert config["data"] == resolved["data"]
    assert 'linvit.load("digits")' in text
    assert 'timm.create_model("local-dir:digits", pretrained=True)' in text
    assert "Touvron et al. 2021" in text
    assert f"{max(value for _, value in RunFolder(run.folder).curves['val/score']):.4f} on the validation" in text
    other = ModelDescription("0", "package.tasks:InkTask", {})  # a task whose network is its own
    tied = RunFolder(run.folder)
    tied._recorded.clear()  # its record names the best score that the run had
    tied.curves["val/score"] = [(9, 0.5), (19, 0.5), (29, 0.25)]  # best.ckpt is of the last of equal ones
    assert "0.5000 on the validation split (val/score), after 20 steps" in write_card(
        other, tied, "mit", {"linvit": "a"}, in_timm=False
    )
    assert "\n# InkTask\n" in write_card(other, RunFolder(run.folder), "mit", {"linvit": "a"}, in_timm=False)


def test_nothing_of_the_machine_is_published(run, pushed):
    with safe_open(pushed[0] / "model.safetensors", "pt") as file:
        metadata = str(file.metadata())
    texts = [(pushed[0] / name).read_text() for name in ("README.md", "config.json")]
    for text in (*texts, metadata):
        assert str(run.folder.parents[1]) not in text
    token = "hf_" + "x" * 30
    config = {
        "source": ["/home/me/images", "~/images", "hub:owner/name", "digits", r"C:\images", f"plain {token}"],
        "pretrained": {"source": "checkpoints/run/best.ckpt"},
        "address": "https://me:word@host/file",
        "api_key": "0123",
        "betas": (0.9, 0.999),
    }
    assert public(config) == {
        "source": [PATH, PATH, "hub:owner/name", "digits", PATH, SECRET],
        "pretrained": {"source": PATH},
        "address": PATH,
        "api_key": SECRET,
        "betas": [0.9, 0.999],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "hostile_module:Mine"}, "the task 'hostile_module:Mine' is not linvit's"),
        ({"options": {"backbone": "hostile_module:Mine"}}, "'hostile_module:Mine' is not registered"),
        ({"options": {"backbone": {"name": "deit_nano", "depth": {"class_path": "os.system"}}}}, "class_path"),
        ({"options": {"backbone": {"name": "timm", "model": "hf-hub:a/b"}}}, "has no model 'hf-hub:a/b'"),
    ],
)
def test_a_hostile_folder(pushed, tmp_path, monkeypatch, change, message):
    (tmp_path / "hostile_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nMine = object\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = shutil.copytree(pushed[0], tmp_path / "hostile")
    with safe_open(folder / "model.safetensors", "pt") as file:
        content = json.loads(file.metadata()["description"])
    content |= {**change, "options": content["options"] | change.get("options", {})}
    save_file(
        load_file(folder / "model.safetensors"),
        folder / "model.safetensors",
        {"description": json.dumps(content)},
    )
    with pytest.raises(linvit.UserError, match=message):
        linvit.load(folder)
    assert not (tmp_path / "ran").exists()


def test_to_the_hub_and_back(run, hub, capfd, tmp_path):
    done = command("push", run.folder, "me/digits", "--license=mit", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out == f"pushed to {hub.address}/me/digits/commit/{'0' * 40}\n"
    assert set(hub.files) == {f"me/digits/{name}" for name in ("README.md", "config.json", "model.safetensors")}
    images = torch.randn(2, 3, 32, 32)
    expected = logits(build_task(*read_trained(run.folder), run.folder).network, images)
    assert torch.equal(logits(linvit.load("hf-hub:me/digits").network, images), expected)
    network = timm.create_model("hf-hub:me/digits", pretrained=True, cache_dir=tmp_path)
    assert torch.equal(logits(network, images), expected)
    said = [*done, *capfd.readouterr(), *(content.decode("latin-1") for content in hub.files.values())]
    assert not any(hub.token in str(text) for text in said)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "the hub asks for a token to write: log in"),
        ("hf_wrong", "'me/digits' was not uploaded: HfHubHTTPError: .*401"),
    ],
)
def test_who_may_not_write(run, hub, monkeypatch, token, message):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    with pytest.raises(linvit.UserError, match=message) as caught:
        push(RunFolder(run.folder), "me/digits", "mit")
    assert not hub.files
    assert not token or token not in str(caught.value)


def test_bad_input(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    half = tmp_path / "quickstart" / "version_0"
    shutil.copytree(run.folder, half)
    text = (half / "config.yaml").read_text()
    (half / "config.yaml").write_text(text.replace("max_epochs: 2", "max_epochs: 3"))
    (half / "result.json").unlink()  # with it a run is finished
    licence = "--license=mit"
    for arguments, message in [
        ([run.folder, "--to", "new"], "say under which licence .* got None"),
        ([run.folder, "--to", "new", "--license=all mine"], "got 'all mine'"),
        ([run.folder, licence], "name either a repository of the hub, OWNER/NAME, or a folder"),
        ([run.folder, "a/b", "--to", "new", licence], "name either a repository"),
        ([run.folder, "digits", licence], "a repository of the hub is called owner/name; got 'digits'"),
        ([run.folder, "--to", "full", licence], "'full' exists and is not an empty folder"),
        ([half, "--to", "new", licence], r"is not finished: .* epoch 2 of 3.* Resume it with\n  linvit fit"),
        (["full", "--to", "new", licence], "'full' is not the folder of a run"),
    ]:
        done = command("push", *arguments, cwd=tmp_path)
        assert done.code == 2, arguments
        assert re.search(message, done.err), done.err
        assert not (tmp_path / "new").exists()
