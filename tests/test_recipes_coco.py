"""The COCO recipes against what mmdetection's configurations of PVT and Swin say, at their total batch."""

from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from linvit.registry import backbones
from linvit.registry.model_info import dense_info
from linvit.runs.configs import find, text
from tests.test_configs import COCO, ROOT
from tests.test_recipes_ade20k import NOT_DECAYED

DEVICES = 8
SIDES = [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]


class Recipe(NamedTuple):
    """Learning rate, weight decay, total batch; whether training has several scales and crops, and norms no decay."""

    lr: float
    weight_decay: float
    batch: int
    swin: bool


RETINANET, MASK_RCNN = Recipe(1e-4, 1e-4, 16, False), Recipe(2e-4, 1e-4, 16, False)
SWIN = Recipe(1e-4, 0.05, 16, True)
PUBLISHED = {  # and drop path
    **{(f"pvt_{size}", "retinanet", "1x"): (RETINANET, rate) for size, rate in (("tiny", 0.1), ("small", 0.1))},
    **{(f"pvt_{size}", "retinanet", "1x"): (RETINANET, 0) for size in ("medium", "large")},
    **{(f"pvt_{size}", "mask_rcnn", "1x"): (MASK_RCNN, rate) for size, rate in (("tiny", 0.1), ("small", 0.1))},
    ("pvt_medium", "mask_rcnn", "1x"): (MASK_RCNN, 0),
    ("pvt_large", "mask_rcnn", "1x"): (Recipe(2e-4 / 1.4, 1e-4, 8, False), 0),
    ("flatten_pvt_tiny", "mask_rcnn", "1x"): (MASK_RCNN, 0.1),
    **{(f"pvt_v2_{size}", "retinanet", "1x"): (RETINANET, 0.1) for size in ("b0", "b1", "b2")},
    **{(f"pvt_v2_{size}", "mask_rcnn", "1x"): (MASK_RCNN, 0.1) for size in ("b0", "b1", "b2")},
    ("pvt_v2_b2", "cascade_mask_rcnn", "3x"): (SWIN, 0.1),
    **{(f"soft_norm_{size}", "retinanet", "1x"): (RETINANET, 0.1) for size in ("tiny", "small", "medium", "large")},
    **{(f"soft_norm_{size}", "mask_rcnn", "1x"): (MASK_RCNN, 0.1) for size in ("tiny", "small", "medium", "large")},
    **{(f"{name}_tiny", "mask_rcnn", "1x"): (SWIN, 0.1) for name in ("swin", "flatten_swin")},
    **{(f"{name}_tiny", "mask_rcnn", "3x"): (SWIN, 0.2) for name in ("swin", "flatten_swin")},
    ("swin_small", "mask_rcnn", "3x"): (SWIN, 0.2),
    ("swin_tiny", "cascade_mask_rcnn", "1x"): (SWIN, 0),
    **{
        (f"{name}_{size}", "cascade_mask_rcnn", "3x"): (SWIN, 0.2)
        for name in ("swin", "flatten_swin")
        for size in ("tiny", "small")
    },
    ("swin_base", "cascade_mask_rcnn", "3x"): (SWIN, 0.3),
}


def merged(path):
    """What a configuration and its bases say; later ones win, key by key."""

    def over(below, above):
        both = below.keys() & above.keys()
        nested = {key: over(below[key], above[key]) for key in both if isinstance(above[key], dict)}
        return {**below, **above, **nested}

    content = yaml.load(text(path), yaml.CSafeLoader)
    named = content.pop("base", [])
    result = {}
    for base in [named] if isinstance(named, str) else named:
        result = over(result, merged(find(base)))
    return over(result, content)


def name_of(key):
    """The name of a recipe, which fits a terminal of 80 columns."""
    return "_".join(key).replace("cascade_mask_rcnn", "cascade")


def test_every_row_has_a_configuration_and_a_number():
    assert {Path(name).stem for name in COCO} == {name_of(key) for key in dense_info() if key[2]}
    assert dense_info().keys() > PUBLISHED.keys()  # test_recipes_dense.py has the others


@pytest.mark.parametrize("key", PUBLISHED, ids=name_of)
def test_it_is_the_published_recipe(key):
    config, (want, drop_path) = merged(ROOT / f"configs/coco/{name_of(key)}.yaml"), PUBLISHED[key]
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    backbone, options = backbones.parse(model["backbone"])
    assert (backbone, model["head"]) == key[:2]
    assert options == dense_info()[key].options
    assert model["lr"] == pytest.approx(want.lr, rel=1e-4)
    assert model["warmup_lr"] == pytest.approx(1e-3 * want.lr, rel=1e-4)
    assert (model["weight_decay"], model["warmup_steps"], model["min_lr"]) == (want.weight_decay, 500, 0)
    assert model["no_decay"] == (["absolute_pos_embed", *NOT_DECAYED] if want.swin else [])
    assert (model["schedule"], model.get("decay_factor", 0.1)) == ("steps", 0.1)
    epochs, falls = {"1x": (12, [8, 11]), "3x": (36, [27, 33])}[key[2]]
    assert (trainer["max_epochs"], model["decay_epochs"]) == (epochs, falls)
    assert DEVICES * data["batch_size"] == want.batch == model["published_batch_size"]
    assert model["drop_path_rate"] == drop_path
    augmentation = data.get("augmentation", {})
    if want.swin:
        assert (augmentation["sides"], augmentation["crop_sides"]) == (SIDES, [400, 500, 600])
        assert augmentation["crop_size"] == [384, 600]
    assert augmentation.get("hflip", 0.5) == 0.5
    assert data["resize_limits"] == [1333, 800]
    assert data.get("masks", False) == (key[1] != "retinanet")
    assert trainer.get("sync_batchnorm", False) == (key[1] == "cascade_mask_rcnn")
