"""The ImageNet recipes against what the papers and their repositories say: rates at every step, groups, settings.

The numbers here are absolute, at the published total batch; the configurations give base rates and how they scale.
"""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from linvit.registry.model_info import model_info
from linvit.tasks import ClassificationTask
from linvit.tasks.optimisation import batch_size_warning, run_schedule, total_batch_size
from linvit.tasks.parameter_groups import parameter_groups
from tests.test_configs import IMAGENET, ROOT, heading, printed_by_its_command

TRAINING_IMAGES = 1_281_167
DEVICES = 8


class Recipe(NamedTuple):
    """Per device: images. Rates: peak, start of the warm-up, end. Epochs: warm-up, cosine, cool-down."""

    batch: int
    peak: float
    start: float
    end: float
    warmup: int
    cosine: int
    cooldown: int
    per: str
    lag: int
    weight_decay: float
    drop_path: float
    clip: float | None
    ema: float | None = None
    mesa: float = 0.0
    shifted: bool = False


def deit(drop_path, clip=None, ema=None):
    return Recipe(128, 1e-3, 1e-6, 1e-5, 5, 300, 0, "epoch", 1, 0.05, drop_path, clip, ema)


def swin(drop_path):
    return Recipe(128, 1e-3, 1e-6, 1e-5, 20, 300, 0, "step", 1, 0.05, drop_path, 5.0)


def cswin(batch, peak, drop_path, ema, weight_decay=0.05):
    return Recipe(batch, peak, 1e-6, 1e-5, 20, 300, 10, "epoch", 0, weight_decay, drop_path, None, ema)


def soft(peak):
    return Recipe(128, peak, 1e-6, 5e-5, 10, 300, 0, "epoch", 0, 0.05, 0.1, 1.0, 0.99996)


def flatten(batch, peak, start, end, warmup, cooldown, drop_path, clip, ema=None, weight_decay=0.05, mesa=0.0):
    return Recipe(batch, peak, start, end, warmup, 300, cooldown, "step", 1, weight_decay, drop_path, clip, ema, mesa)


def vssd(peak, end, drop_path):
    return flatten(128, peak, 1e-6, end, 20, 0, drop_path, 5.0, 0.9999)._replace(shifted=True)


def ravlt(drop_path):
    return deit(drop_path, ema=0.99992)


def pola_pp(batch, peak, start, end, drop_path):
    return flatten(batch, peak, start, end, 20, 0, drop_path, 5.0, 0.99982)


SMALL_PVTS = [(kind, size) for kind in ("agent", "inline") for size in ("tiny", "small")]
CA_DEIT = [("tiny", 0.0), ("small", 0.1), ("base", 0.4)]  # with their rates of drop path
PUBLISHED = {
    **{f"deit_{size}": deit(0.1, ema=0.99996) for size in ("tiny", "small", "base")},
    "deit_base_384": Recipe(64, 5e-6, 1e-6, 5e-6, 5, 30, 0, "epoch", 1, 1e-8, 0.0, None, 0.99996),
    **{name: deit(0.1, ema=0.99996) for name in ("flatten_deit_tiny", "flatten_deit_small", "hydra_deit_base")},
    **{f"pvt_{size}": deit(0.1) for size in ("tiny", "small")},
    **{f"pvt_{size}": deit(0.3, clip=1.0) for size in ("medium", "large")},
    **{f"pvt_v2_{size}": deit(0.1) for size in ("b0", "b1", "b2", "b2_li")},
    **{f"pvt_v2_{size}": deit(0.3, clip=1.0) for size in ("b3", "b4", "b5")},
    "swin_tiny": swin(0.2),
    "swin_small": swin(0.3),
    "swin_base": swin(0.5),
    "swin_base_384": Recipe(32, 1e-5, 1e-8, 1e-7, 5, 30, 0, "step", 1, 1e-8, 0.5, 5.0),
    "cswin_tiny": cswin(256, 2e-3, 0.2, 0.99984),
    "cswin_small": cswin(256, 2e-3, 0.4, 0.99984),
    "cswin_base": cswin(128, 1e-3, 0.5, 0.99992, weight_decay=0.1),
    "cswin_base_384": Recipe(32, 5e-6, 5e-6, 5e-7, 0, 20, 10, "epoch", 0, 1e-8, 0.7, None, 0.9998),
    "cswin_large": Recipe(64, 2.5e-4, 1e-6, 5e-7, 0, 30, 10, "epoch", 0, 1e-8, 0.2, None, 0.9996),
    **{f"{family}_{size}": soft(1e-3) for family in ("soft", "soft_norm") for size in ("tiny", "small")},
    "soft_medium": soft(3.5e-4),
    "soft_norm_medium": soft(4e-4),
    **{f"{family}_large": soft(3.3e-4) for family in ("soft", "soft_norm")},
    **{f"{family}_huge": soft(2.7e-4) for family in ("soft", "soft_norm")},
    "flatten_pvt_tiny": flatten(128, 1e-3, 2e-6, 2e-5, 5, 10, 0.1, None),
    "flatten_pvt_small": flatten(64, 5e-4, 1e-6, 1e-5, 5, 10, 0.1, None),
    "flatten_pvt_medium": flatten(64, 5e-4, 1e-6, 1e-5, 5, 10, 0.3, 1.0),
    "flatten_pvt_large": flatten(32, 2.5e-4, 5e-7, 5e-6, 5, 10, 0.3, 1.0),
    **{f"flatten_pvt_v2_b{i}": flatten(128, 1e-3, 2e-6, 2e-5, 5, 10, 0.1, None) for i in range(3)},
    "flatten_pvt_v2_b3": flatten(128, 1e-3, 2e-6, 2e-5, 5, 10, 0.3, 1.0),
    "flatten_pvt_v2_b4": flatten(64, 5e-4, 1e-6, 1e-5, 5, 10, 0.3, 1.0),
    "flatten_swin_tiny": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.2, 5.0),
    "flatten_swin_small": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.3, 5.0),
    "flatten_swin_base": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.5, 5.0),
    "flatten_swin_base_384": Recipe(32, 1e-5, 1e-8, 1e-7, 5, 30, 0, "step", 1, 1e-8, 0.5, 5.0),
    "flatten_cswin_tiny": flatten(256, 2e-3, 4e-6, 4e-5, 20, 10, 0.2, None, 0.99984),
    "flatten_cswin_small": flatten(128, 1e-3, 2e-6, 2e-5, 20, 10, 0.4, None, 0.99984),
    "flatten_cswin_base": flatten(64, 5e-4, 1e-6, 1e-5, 20, 10, 0.5, None, 0.99982, weight_decay=0.1),
    "flatten_cswin_base_384": Recipe(32, 2.5e-6, 2.5e-6, 2.5e-7, 0, 20, 10, "step", 1, 1e-8, 0.7, None, 0.99982),
    **{f"nalaformer_{size}": ravlt(0.1) for size in ("xt", "t")},
    **{f"{family}_s": ravlt(0.15) for family in ("ravlt", "mavit", "nalaformer")},
    **{f"{family}_t": ravlt(0.1) for family in ("ravlt", "mavit")},
    **{f"{family}_b": ravlt(0.4) for family in ("ravlt", "mavit")},
    **{f"{family}_l": ravlt(0.55) for family in ("ravlt", "mavit")},
    "nalaformer_b": ravlt(0.4),
    "nalaformer_l": ravlt(0.55),
    **{f"pola_pp_b{i}": pola_pp(256, 2e-3, 2e-6, 4e-7, 0.1) for i in range(3)},
    "pola_pp_b3": pola_pp(128, 1e-3, 1e-6, 2e-7, 0.15),
    "pola_pp_b5": Recipe(64, 2e-5, 5e-7, 5e-6, 1, 300, 5, "step", 1, 1e-8, 0.55, None, 0.99982),
    "pola_pp_b4": flatten(128, 1e-3, 2e-7, 2e-5, 5, 10, 0.4, 1.0, 0.99982),
    "mlla_tiny": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.2, 5.0, 0.9999, mesa=1.0),
    "mlla_small": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.3, 5.0, 0.99995, mesa=1.5),
    "mlla_base": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.5, 5.0, 0.99995, mesa=2.0),
    **{f"vittt_{s}": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, p, 5.0) for s, p in CA_DEIT},
    "h_vittt_tiny": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.2, 5.0, 0.9999, mesa=1.0),
    "h_vittt_small": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.4, 5.0, 0.9999, mesa=1.5),
    "h_vittt_base": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.6, 5.0, 0.9999, mesa=2.0),
    **{f"vssd_{s}": vssd(1e-3, 1e-5, p) for s, p in (("micro", 0.1), ("tiny", 0.2))},
    **{f"vssd_{s}": vssd(6e-4, 6e-6, p) for s, p in (("small", 0.4), ("base", 0.6))},
    **{f"ca_deit_{s}": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, p, 5.0) for s, p in CA_DEIT},
    "mhla_deit_small": Recipe(128, 1e-3, 1e-6, 0.0, 10, 200, 0, "step", 0, 0.05, 0.1, None, 0.9996),
    "pola_pvt_tiny": flatten(128, 1e-3, 2e-6, 2e-5, 5, 10, 0.1, None),
    "pola_pvt_small": flatten(64, 5e-4, 1e-6, 1e-5, 5, 10, 0.1, None),
    "pola_pvt_medium": flatten(64, 5e-4, 1e-6, 1e-5, 5, 10, 0.3, 1.0),
    "pola_pvt_large": flatten(32, 2.5e-4, 5e-7, 5e-6, 5, 10, 0.3, 1.0),
    "pola_swin_tiny": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.2, 5.0),
    "pola_swin_small": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.3, 5.0),
    "pola_swin_base": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.5, 5.0),
    "agent_deit_tiny": flatten(512, 4e-3, 4e-6, 4e-5, 20, 0, 0.0, 5.0),
    "agent_deit_small": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.1, 5.0),
    "agent_deit_small_448": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.1, 5.0),
    "agent_deit_base": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.3, 5.0),
    "inline_deit_tiny": flatten(512, 4e-3, 4e-6, 4e-5, 20, 0, 0.1, 5.0),
    "inline_deit_small": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.1, 5.0),
    "inline_deit_base": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.1, 5.0),
    **{f"{kind}_pvt_{size}": flatten(128, 1e-3, 2e-6, 2e-5, 5, 10, 0.1, None) for kind, size in SMALL_PVTS},
    **{f"{kind}_pvt_medium": flatten(128, 1e-3, 2e-6, 2e-5, 5, 10, 0.3, 1.0) for kind in ("agent", "inline")},
    **{f"{kind}_pvt_large": flatten(64, 5e-4, 1e-6, 1e-5, 5, 10, 0.3, 1.0) for kind in ("agent", "inline")},
    "agent_pvt_medium_256": flatten(64, 5e-4, 1e-6, 1e-5, 5, 10, 0.3, 1.0),
    **{f"{kind}_swin_tiny": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.2, 5.0) for kind in ("agent", "inline")},
    **{f"{kind}_swin_small": flatten(128, 1e-3, 1e-6, 1e-5, 20, 0, 0.3, 5.0) for kind in ("agent", "inline")},
    "agent_swin_small_288": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.3, 5.0),
    **{f"{kind}_swin_base": flatten(64, 5e-4, 5e-7, 5e-6, 20, 0, 0.5, 5.0) for kind in ("agent", "inline")},
    "agent_swin_base_384": Recipe(32, 1e-5, 1e-8, 1e-7, 5, 30, 0, "step", 1, 1e-8, 0.5, 5.0),
    "agent_cswin_tiny": flatten(128, 1e-3, 2e-6, 2e-5, 20, 10, 0.2, None, 0.99984),
    "agent_cswin_small": flatten(128, 1e-3, 2e-6, 2e-5, 20, 10, 0.4, None, 0.99984),
    "agent_cswin_base": flatten(64, 5e-4, 1e-6, 1e-5, 20, 10, 0.5, None, 0.99992, weight_decay=0.1),
    "agent_cswin_base_384": Recipe(32, 2.5e-6, 2.5e-6, 2.5e-7, 0, 20, 10, "step", 1, 1e-8, 0.7, None, 0.9998),
    "inline_cswin_tiny": flatten(128, 1e-3, 2e-6, 2e-5, 20, 10, 0.2, None, round(0.9996 ** (1024 / 4096), 5)),
    "inline_cswin_small": flatten(128, 1e-3, 2e-6, 2e-5, 20, 10, 0.4, None, round(0.9996 ** (1024 / 4096), 5)),
    "inline_cswin_base": flatten(64, 5e-4, 1e-6, 1e-5, 20, 10, 0.5, None, round(0.9996 ** (512 / 4096), 5), 0.1),
}
SIZES = {
    "mhla_deit_small": 256,
    "inline_deit_small": 288,
    "inline_deit_base": 448,
}  # of images; others end in it, or have 224
SQUASHED = ("flatten_swin", "flatten_pvt", "flatten_cswin", "pola", "agent", "inline")  # of one program
MIXED = {
    "mhla_deit_small": (0.2, 1.0),
    "cswin_base_384": (0.1, 0.1),
    "cswin_large": (0.01, 0.3),
}  # alphas of mixup and CutMix, of others 0.8 and 1
GUESSED = {"cswin_large_384"}  # its configuration says that no source settles it
RAVLT = {"ravlt", "mavit", "nalaformer"}
REPEATED = {"deit", "pvt"} | RAVLT  # families that see each image three times
NO_DECAY = {  # parameters of more than one dimension that are not decayed
    "DeiT": {"pos_embed", "cls_token"},
    "PVT": {"stages.3.cls_token"},
    "PVTv2": set(),
    "Swin": {"relative_position_bias_table"},
    "CSWin": set(),
    "SOFT": {"stages.3.cls_token"},
    "RAVLT": set(),
    "MLLA": set(),
    "HViTTT": set(),
}


@cache
def configuration(name):
    """All that the command of a recipe amounts to."""
    return printed_by_its_command(f"configs/imagenet/{name}.yaml", ROOT)


@cache
def task_of(name):
    """The task of a recipe, without memory or numbers."""
    content = configuration(name)
    arguments = {
        key: value for key, value in content["model"]["init_args"].items() if key not in ("num_classes", "pretrained")
    }
    arguments["img_size"] = content["data"]["init_args"]["img_size"]
    with torch.device("meta"):
        return ClassificationTask(**arguments, num_classes=1000)


def test_every_recipe_is_here():
    assert {name.rpartition("/")[2].removesuffix(".yaml") for name in IMAGENET} == PUBLISHED.keys() | GUESSED


def test_a_recipe_without_a_source_says_so():
    for name in GUESSED:
        assert "its settings are not published" in (ROOT / f"configs/imagenet/{name}.yaml").read_text()


QUICK = {  # one of each program's, and what only they do; the others are slow
    *(
        "deit_tiny",
        "pvt_v2_b0",
        "swin_base_384",
        "cswin_tiny",
        "soft_tiny",
        "flatten_pvt_tiny",
        "flatten_cswin_base_384",
    ),
    *("ravlt_t", "pola_pp_b0", "mlla_tiny", "vssd_micro", "mhla_deit_small", "inline_deit_tiny", "agent_swin_tiny"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if Path(n).stem in QUICK else pytest.mark.slow) for n in IMAGENET]
)
def test_it_is_the_published_recipe(name):
    check_batch(name)
    stem = Path(name).stem
    if stem not in GUESSED:
        check_rates(stem)
        check_settings(stem)
        check_decay(stem)


def check_batch(name):
    """The heading's devices and precision are those of the settings."""
    hardware = heading(name)["Hardware"]
    # float16 by Apex or by autocast; of the others no source says it.
    of_float16 = ("deit_", "pvt_", "swin_", "cswin_", "mlla_", "inline_", "ca_deit_", "vittt_", "h_vittt_", "vssd_")
    assert ("--trainer.precision=16-mixed" in hardware) == Path(name).name.startswith(of_float16)
    of_float32 = ("soft", "flatten_swin", "flatten_pvt", "flatten_cswin", "pola", "agent", "mhla")
    assert ("--trainer.precision=32-true" in hardware) == Path(name).name.startswith(of_float32)
    total, devices, images = map(int, re.search(r"(\d+): (\d+) devices with (\d+) images", hardware).groups())
    assert total == devices * images
    stem = Path(name).stem
    content = configuration(stem)
    assert content["model"]["init_args"]["published_batch_size"] == (None if stem in GUESSED else total)
    assert content["data"]["init_args"]["batch_size"] == images


def check_rates(name):
    """The published formula over a whole run of ImageNet's length: around each end of an epoch, and every 97th step."""
    recipe, content = PUBLISHED[name], configuration(name)
    batch = content["data"]["init_args"]["batch_size"]
    assert batch == recipe.batch
    epochs = content["trainer"]["max_epochs"]
    assert epochs == recipe.cosine + recipe.cooldown
    per_epoch = TRAINING_IMAGES // (batch * DEVICES)
    task = task_of(name)
    trainer = SimpleNamespace(
        estimated_stepping_batches=epochs * per_epoch,
        fit_loop=SimpleNamespace(setup_data=lambda: None),
        num_training_batches=per_epoch,
        limit_train_batches=1.0,
        accumulate_grad_batches=1,
        fast_dev_run=False,
        train_dataloader=SimpleNamespace(batch_size=batch, sampler=None),
        world_size=DEVICES,
        callbacks=[],
    )
    schedule = run_schedule(task.optimisation, trainer)
    assert total_batch_size(trainer) == batch * DEVICES
    assert batch_size_warning(task.optimisation, trainer, schedule, before=None) == ""
    ends = per_epoch * np.arange(1, epochs)
    steps = np.unique(np.concatenate([np.arange(0, epochs * per_epoch, 97), ends - 1, ends, ends + 1]))
    unit = per_epoch if recipe.per == "step" else 1
    index = np.maximum((steps if recipe.per == "step" else steps // per_epoch) - recipe.lag, 0)
    warmup, cosine = recipe.warmup * unit, recipe.cosine * unit
    rising = recipe.start + index * (recipe.peak - recipe.start) / max(warmup, 1)
    begin = warmup if recipe.shifted else 0
    place = (index - begin) / (cosine - begin)
    falling = recipe.end + (recipe.peak - recipe.end) * (1 + np.cos(np.pi * place)) / 2
    wanted = np.select([index < warmup, index < cosine], [rising, falling], recipe.end)
    got = np.array([schedule(step) for step in steps.tolist()])
    np.testing.assert_allclose(got, wanted, rtol=1e-9)


def check_settings(name):
    """Model, augmentation and evaluation; timm is told of the same evaluation."""
    recipe, content = PUBLISHED[name], configuration(name)
    model, data = content["model"]["init_args"], content["data"]["init_args"]
    assert model["backbone"] == name
    assert model["weight_decay"] == recipe.weight_decay
    assert model["drop_path_rate"] == recipe.drop_path
    assert (model["ema_decay"], model["mesa"]) == (recipe.ema, recipe.mesa)
    assert content["trainer"]["gradient_clip_val"] == recipe.clip
    assert model["backbone_lr_scale"] == (0.05 if name == "cswin_large" else 1.0)
    assert (model["mixup_alpha"], model["cutmix_alpha"]) == MIXED.get(name, (0.8, 1.0))
    assert model["label_smoothing"] == 0.1
    augmentation = data["augmentation"]
    assert augmentation["auto_augment"] == "rand-m9-mstd0.5-inc1"
    assert augmentation["random_erasing"] == 0.25
    assert augmentation["crop_scale"] == [0.08, 1.0]
    assert augmentation["hflip"] == 0.5
    family = (
        name.removeprefix("flatten_").partition("_")[0]
        if "deit" not in name or name.startswith(("ca_", "mhla_"))
        else "deit"
    )
    flattened = name.startswith(SQUASHED)
    assert augmentation["interpolation"] == (
        "random" if family in ("cswin", "soft", "mhla") and not flattened else "bicubic"
    )
    assert augmentation["erase_after_mixing"] == (family in ("cswin", "soft", "mhla") and not flattened)
    assert not data["exif_orientation"]
    assert data["repeated_aug"] == (3 if family in REPEATED and not flattened else 1)
    assert content["trainer"]["sync_batchnorm"] == (family in RAVLT)
    sized = re.search(r"_(\d{3})$", name)
    assert data["img_size"] == (int(sized[1]) if sized else SIZES.get(name, 224))
    whole = dict.fromkeys(
        ["cswin_base_384", "swin_base_384", "flatten_swin_base_384", "agent_swin_base_384", "agent_swin_small_288"], 1.0
    )
    assert data["crop_mode"] == ("squash" if flattened or name == "swin_base_384" else "center")
    assert data["crop_pct"] == whole.get(name, 0.9 if family in ("cswin", "soft") and not flattened else 0.875)

    facts = model_info()[name]
    assert (facts.crop_pct, facts.crop_mode) == (data["crop_pct"], data["crop_mode"])


def check_decay(name):
    """Vectors, and the names that the paper's program lists; FLatten's and PolaFormer's 3-D tables are decayed."""
    task = task_of(name)
    names = {id(parameter): name for name, parameter in task.network.named_parameters()}
    found = {True: set(), False: set()}
    for group in parameter_groups(task, 1.0, 0.05):
        found[group["weight_decay"] > 0] |= {names[id(p)] for p in group["params"] if id(p) in names}
    shapes = {name: parameter.ndim for name, parameter in task.network.named_parameters()}
    no_decay = NO_DECAY[type(task.network).__name__]
    expected = {name for name, ndim in shapes.items() if ndim > 1 and any(name.endswith(end) for end in no_decay)}
    assert {name for name in found[False] if shapes[name] > 1} == expected
    assert all(shapes[name] > 1 for name in found[True])
    tables = [name for name in shapes if name.endswith(("positional_encoding", "mechanism.scale"))]
    assert set(tables) <= found[True]
    assert bool(tables) == name.startswith(("flatten_", "pola_pvt_", "pola_swin_"))
