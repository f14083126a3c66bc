"""The ADE20K recipes against what mmsegmentation's configurations of PVT, Swin and CSwin say, at their total batch."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import linvit
from linvit.registry import backbones
from linvit.registry.model_info import dense_info
from linvit.tasks.parameter_groups import parameter_groups
from linvit.tasks.published import published_miou
from tests.test_configs import ADE20K, ROOT, printed

DEVICES = 8


class Recipe(NamedTuple):
    """Learning rate, weight decay, power of the decay, steps, warm-up steps, total batch, drop path."""

    lr: float
    weight_decay: float
    power: float
    steps: int
    warmup: int
    batch: int
    drop_path: float


def upernet(drop_path):
    return Recipe(6e-5, 0.01, 1.0, 160_000, 1500, 16, drop_path)


NOT_DECAYED = ["relative_position_bias_table", "mechanism.tables", "norm"]
SEMANTIC_FPN = Recipe(2e-4, 1e-4, 0.9, 40_000, 0, 32, 0.1)
PUBLISHED = {
    **{f"{name}_semantic_fpn": SEMANTIC_FPN for name in ("pvt_tiny", "pvt_small", "pvt_medium", "pvt_large")},
    "flatten_pvt_tiny_semantic_fpn": SEMANTIC_FPN,
    **{f"swin_{size}_upernet": upernet(0.3) for size in ("tiny", "small", "base")},
    **{f"flatten_swin_{size}_upernet": upernet(0.3) for size in ("tiny", "small")},
    **{f"cswin_{size}_upernet": upernet(rate) for size, rate in (("tiny", 0.3), ("small", 0.4), ("base", 0.6))},
    **{f"soft_norm_{size}_upernet": upernet(0.3) for size in ("small", "medium")},
}
# Tables of positions and encodings are those of images of 224, interpolated on the crops of 512.
PARAMETERS = {
    "pvt_tiny_semantic_fpn": 16_981_398,
    "pvt_small_semantic_fpn": 28_237_974,
    "pvt_medium_semantic_fpn": 47_960_214,
    "pvt_large_semantic_fpn": 65_121_430,
    "flatten_pvt_tiny_semantic_fpn": 15_903_126,
    "flatten_swin_tiny_upernet": 60_845_892,
    "flatten_swin_small_upernet": 82_163_796,
}


def test_every_row_has_a_configuration():
    assert {Path(name).stem for name in ADE20K} == {"_".join(key[:2]) for key in dense_info() if not key[2]}


@pytest.mark.parametrize("name", [name for name in ADE20K if Path(name).stem in PUBLISHED])  # of others: _dense.py
def test_it_is_the_published_recipe(name, tmp_path):
    want, config = PUBLISHED[Path(name).stem], printed(f"--config={ROOT / name}", cwd=tmp_path)
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    backbone, options = backbones.parse(model["backbone"])
    assert Path(name).stem == f"{backbone}_{model['head']}"
    size = {"img_size": 224} if Path(name).stem in PARAMETERS else {}
    assert options == {**dense_info()[backbone, model["head"], ""].options, **size}
    network = {key: model[key] for key in ("backbone", "head", "attention")} | {"num_classes": 150, "img_size": 512}
    assert published_miou(network) is not None
    if size:
        with torch.device("meta"):
            built = linvit.create_segmentor(**network)
        assert sum(p.numel() for p in built.parameters()) == PARAMETERS[Path(name).stem]
    assert (model["schedule"], model["poly_power"], model["min_lr"]) == ("poly", want.power, 0)
    assert (model["lr"], model["weight_decay"], model["betas"]) == (want.lr, want.weight_decay, [0.9, 0.999])
    assert model["no_decay"] == (NOT_DECAYED if want.warmup else [])
    assert model["warmup_steps"] == want.warmup
    assert not want.warmup or model["warmup_lr"] == pytest.approx(1e-6 * want.lr)
    assert (trainer["max_steps"], trainer["max_epochs"]) == (want.steps, None)
    assert trainer["val_check_interval"] == want.steps // 10
    assert trainer["check_val_every_n_epoch"] is None
    assert DEVICES * data["batch_size"] == want.batch == model["published_batch_size"]
    assert model["drop_path_rate"] == want.drop_path
    assert (model["loss_average"], model["auxiliary_weight"]) == ("all", 0.4)
    assert (data["img_size"], data["resize_limits"], data["reduce_zero_label"]) == (512, [2048, 512], True)
    assert data["multiple"] == (1 if want.warmup else 32)
    assert trainer["sync_batchnorm"]


def test_agent_attentions_tables_are_not_decayed_in_swins_place():
    """As in the segmentors and detectors of its authors, which name all six tables."""
    with torch.device("meta"):
        model = linvit.create_backbone("agent_swin_tiny", num_classes=0)
    undecayed = next(
        group for group in parameter_groups(model, 1.0, 0.05, no_decay=NOT_DECAYED) if not group["weight_decay"]
    )
    kept = {id(parameter) for parameter in undecayed["params"]}
    tables = {name: id(parameter) in kept for name, parameter in model.named_parameters() if ".tables." in name}
    assert len(tables) == 6 * 10  # blocks with agents
    assert all(tables.values())
