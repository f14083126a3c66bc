"""Recipes of the newer papers for COCO and ADE20K against what their authors' configurations say."""

import csv
from pathlib import Path

import pytest
import torch

import linvit
from linvit.registry import backbones, heads
from linvit.registry.model_info import dense_info
from linvit.tasks.published import published_ap, published_miou
from tests.test_configs import ROOT
from tests.test_recipes_coco import SIDES, merged, name_of

with (Path(__file__).parent / "official" / "dense_recipes.csv").open(newline="", encoding="utf-8") as file:
    ROWS = {tuple(filter(None, (row["backbone"], row["head"], row["schedule"]))): row for row in csv.DictReader(file)}
OURS = {"an_bias", "na_bias", "ah_bias", "aw_bias", "ha_bias", "wa_bias"}  # tables of `agent`, ours is one name for all
NOWHERE = {"rpe_table", "pos_block", *OURS}  # that no network here has by this name
DEVICES = 8
PER_RATE = {"mavit": 32}  # devices by which the learning rate is RAVLT's, as the authors do not publish theirs


def settings(key):
    """What a recipe and its base say, and what its authors say."""
    config = merged(ROOT / f"configs/{'coco' if len(key) == 3 else 'ade20k'}/{name_of(key)}.yaml")
    return config["model"]["init_args"], config["data"]["init_args"], config["trainer"], ROWS[key]


@pytest.mark.parametrize("key", ROWS, ids=name_of)
def test_it_is_what_the_authors_say(key):
    model, data, trainer, want = settings(key)
    assert backbones.parse(model["backbone"])[0] == key[0]
    assert heads.parse(model["head"])[0] == key[1]
    head_lr = float(want["lr"]) * float(want["head_lr_mult"] or 1)
    assert model["lr"] == pytest.approx(head_lr, rel=1e-4)
    assert model["lr"] * model.get("backbone_lr_scale", 1) == pytest.approx(float(want["lr"]), rel=1e-4)
    assert model["weight_decay"] == float(want["weight_decay"])
    assert model["drop_path_rate"] == float(want["drop_path"] or 0.1)  # PVTv2's stands in its program
    no_decay = set(want["no_decay"].split())
    assert set(model["no_decay"]) - {"mechanism.tables", "absolute_pos_embed", ".bn."} == (
        no_decay - NOWHERE - {"absolute_pos_embed"}
    )
    assert (".bn." in model["no_decay"]) == (want["norm_decay_mult"] == "0.0")  # of norms whatever their name is
    assert not no_decay >= OURS or "mechanism.tables" in model["no_decay"]
    devices = PER_RATE.get(key[0].partition("_")[0], DEVICES) if len(key) == 3 else DEVICES
    assert (
        model["published_batch_size"] == devices * int(want["images_per_device"] or 2) == DEVICES * data["batch_size"]
    )
    assert model["warmup_steps"] == int(want["warmup"])
    if want["warmup_ratio"]:
        assert model["warmup_lr"] == pytest.approx(float(want["warmup_ratio"]) * head_lr, rel=1e-4)
    if len(key) == 3:
        assert (trainer["max_epochs"], model["decay_epochs"]) == (
            int(want["epochs"]),
            [*map(int, want["steps"].split())],
        )
        augmentation = data.get("augmentation", {})
        assert augmentation.get("sides", []) == (SIDES if want["multi_scale"] == "True" else [])
    else:
        assert (trainer["max_steps"], model["poly_power"]) == (int(want["iterations"]), float(want["power"]))
        assert model["min_lr"] == float(want["min_lr"])
        assert data.get("multiple", 1) == (32 if key[1] == "light_ham" else 1)


@pytest.mark.parametrize("key", ROWS, ids=name_of)
def test_it_is_compared_with_what_is_published_of_it(key):
    model, _, _, _ = settings(key)
    network = {key: model[key] for key in ("backbone", "head")} | {"attention": model.get("attention")}
    if len(key) == 3:
        want, found = (
            dense_info()[key],
            published_ap({**network, "num_classes": 80, "decay_epochs": model["decay_epochs"]}),
        )
    else:
        want, found = dense_info()[(*key, "")], published_miou({**network, "num_classes": 150, "img_size": 512})
    assert (found is None) == (not want.scores)
    assert found is None or (found.scores, found.source) == (want.scores, want.source)


SIZED = [key for key, row in ROWS.items() if row["params_m"] and key[-1] != "3x"]


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=[] if "tiny" in key[0] or key[0] == "ravlt_t" else pytest.mark.slow) for key in SIZED],
    ids=name_of,
)
def test_it_has_the_published_number_of_parameters(key):
    model, _, _, want = settings(key)
    network = {"backbone": model["backbone"], "head": model["head"]}
    with torch.device("meta"):
        if len(key) == 3:
            built = linvit.create_detector(**network, num_classes=80)
        else:
            built = linvit.create_segmentor(**network, num_classes=150)
    counted = [(name, p.numel()) for name, p in built.named_parameters()]
    if key[0].startswith(("vssd_", "h_vittt_")):  # their counts are of the network that is evaluated
        counted = [(name, count) for name, count in counted if ".aux" not in name]
    assert abs(sum(count for _, count in counted) / 1e6 - float(want["params_m"])) < 1
