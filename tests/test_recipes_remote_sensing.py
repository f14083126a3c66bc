"""The recipes of remote sensing against what MAResU-Net's letter, GeoSeg, and MACU-Net's program say."""

from pathlib import Path

import pytest

from tests.test_configs import REMOTE_SENSING, ROOT, heading, printed

MARESUNET = {  # epochs, crops and factors of the size of GeoSeg
    "vaihingen": (105, 512, [0.5, 0.75, 1, 1.25, 1.5]),
    "potsdam": (45, 768, [0.75, 1, 1.25, 1.5]),
}
MACUNET = ("whdld", "gid", "vaihingen", "potsdam")


def recipe(name, folder):
    config = printed(f"--config={ROOT}/configs/remote_sensing/{name}.yaml", cwd=folder)
    return config["model"]["init_args"], config["data"]["init_args"], config["trainer"]


def test_each_network_and_each_set_has_a_configuration():
    expected = {f"maresunet_{name}" for name in MARESUNET} | {f"macunet_{name}" for name in MACUNET}
    expected |= {f"maresunet_resnet18_{name}" for name in MARESUNET}
    assert {Path(name).stem for name in REMOTE_SENSING} == expected


@pytest.mark.parametrize("name", MARESUNET)
def test_maresunet(name, tmp_path):
    model, data, trainer = recipe(f"maresunet_{name}", tmp_path)
    assert model["backbone"] == {"name": "timm", "model": "resnet34.tv_in1k", "pretrained": True}
    assert model["head"] == "maresunet"
    assert (model["lr"], model["weight_decay"], model["betas"], model["no_decay"]) == (3e-4, 0.01, [0.9, 0.999], [])
    assert data["batch_size"] == model["published_batch_size"] == 4
    assert (model["schedule"], model["cycle_epochs"], model["cycle_growth"]) == ("cosine_restarts", 15, 2)
    assert (model["lr_interval"], model["warmup_epochs"], model["min_lr"]) == ("epoch", 0, 0)
    assert (trainer["max_epochs"], data["img_size"], data["augmentation"]["ratios"]) == MARESUNET[name]
    assert (model["loss_average"], model["dice_weight"], model["label_smoothing"]) == ("valid", 0, 0)
    augmentation = {"interpolation": "bicubic", "max_class_ratio": 0.75, "hflip": 0, "photometric": False}
    assert data["augmentation"].items() >= augmentation.items()


@pytest.mark.parametrize("name", MARESUNET)
def test_maresunet_as_geoseg_trains(name, tmp_path):
    model, data, trainer = recipe(f"maresunet_resnet18_{name}", tmp_path)
    assert model["backbone"] == {"name": "timm", "model": "resnet18.tv_in1k", "pretrained": True}
    assert (model["head"], model["lookahead"]) == ("maresunet", 5)
    assert (model["lr"], model["backbone_lr_scale"] * model["lr"]) == (6e-4, pytest.approx(6e-5))
    assert (model["weight_decay"], model["no_decay"]) == (0.01, ["bias"])
    assert data["batch_size"] == model["published_batch_size"] == 8
    assert (model["loss_average"], model["dice_weight"], model["label_smoothing"]) == ("all", 1, 0.05)
    letter, letter_data, letter_trainer = recipe(f"maresunet_{name}", tmp_path)
    same = ("schedule", "cycle_epochs", "cycle_growth", "lr_interval", "warmup_epochs", "min_lr", "exclude_from_mean")
    assert {key: model[key] for key in same} == {key: letter[key] for key in same}
    assert (trainer["max_epochs"], data["img_size"]) == (letter_trainer["max_epochs"], letter_data["img_size"])
    assert data["augmentation"] == letter_data["augmentation"]


@pytest.mark.parametrize("name", MACUNET)
def test_macunet(name, tmp_path):
    model, data, trainer = recipe(f"macunet_{name}", tmp_path)
    assert (model["backbone"], model["head"]) == ("macunet_encoder", "macunet")
    assert (model["lr"], model["weight_decay"], model["betas"]) == (3e-4, 0, [0.9, 0.999])
    assert data["batch_size"] == model["published_batch_size"] == 16
    assert (model["schedule"], model["cycle_epochs"], model["cycle_growth"]) == ("cosine_wave", 10, 1)
    assert (model["lr_interval"], model["warmup_epochs"], model["min_lr"]) == ("epoch", 0, pytest.approx(3e-6))
    assert (trainer["max_epochs"], 16 * trainer["limit_train_batches"]) == (100, 2000)
    assert trainer["callbacks"][-1]["init_args"]["patience"] == 10
    assert (model["loss_average"], data["img_size"]) == ("valid", 256)
    assert (data["mean"], data["std"]) == ([0, 0, 0], [1, 1, 1])
    augmentation = {"ratio": [1, 1], "ratios": None, "max_class_ratio": None, "hflip": 0, "photometric": False}
    assert data["augmentation"].items() >= augmentation.items()


@pytest.mark.parametrize("name", REMOTE_SENSING)
def test_the_scores_of_the_papers_are_named_and_clutter_is_left_out_of_means(name, tmp_path):
    stem = Path(name).stem
    model, data, _ = recipe(stem, tmp_path)
    aerial = "whdld" not in stem and "gid" not in stem
    assert data["reduce_zero_label"] is ("whdld" in stem)
    assert (data["class_names"], model["exclude_from_mean"]) == (("isprs", ["clutter"]) if aerial else (None, []))
    expected = heading(name)["Expected"]
    assert "not yet run" in expected
    assert all(tag in expected for tag in ("test/mF1", "test/aAcc", "test/kappa", "val/score", "mIoU"))
