"""Fake official checkpoints: small models, official names, and the containers that the repositories save."""

import argparse
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.official import conv, fill, linear, norm
from tests.official.agent import agent_cswin, agent_deit, agent_pvt, agent_swin
from tests.official.cswin import cswin, flatten_cswin
from tests.official.mlla import mlla
from tests.official.pola import pola_pvt, pola_swin
from tests.official.pvt import pvt
from tests.official.pvt_v2 import pvt_v2
from tests.official.ravlt import ravlt
from tests.official.soft import soft
from tests.official.swin import swin

State = dict[str, Tensor]


class CfgNode(dict):
    """Pickles as yacs' configuration does: a dict with attributes."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__({key: CfgNode(value) if isinstance(value, dict) else value for key, value in content.items()})
        self.__dict__["__immutable__"] = True
        self.__dict__["__deprecated_keys__"] = set()


CONFIG = {"MODEL": {"TYPE": "flatten", "NUM_CLASSES": 1000}, "AUG": {"MIXUP": 0.8}}


def yacs_save(content: Any, path: Path, **options: Any) -> None:
    """Saves content with a configuration whose class is in a module that is gone afterwards."""
    module = types.ModuleType("yacs_stand_in")
    module.CfgNode = type("CfgNode", (CfgNode,), {"__module__": module.__name__})
    sys.modules[module.__name__] = module
    try:
        config = module.CfgNode(CONFIG)
        torch.save({**content, "config": config}, path, **options)
    finally:
        del sys.modules[module.__name__]


def training(state: State) -> dict[str, Any]:
    """What lies beside the weights: a scheduler, numpy numbers, epochs."""
    first = next(iter(state.values()))
    return {
        "optimizer": {"state": {0: {"step": 5, "exp_avg": torch.ones_like(first)}}, "param_groups": [{"lr": 1e-3}]},
        "lr_scheduler": {"best": np.float64(81.5)},
        "max_accuracy": np.float64(82.1),
        "epoch": 299,
    }


def save_bare(state: State, path: Path) -> None:
    torch.save(state, path)


def save_model(state: State, path: Path) -> None:
    torch.save({"model": state}, path)


def save_flatten(state: State, path: Path) -> None:
    """FLatten's training code: optimizer, scheduler, configuration."""
    yacs_save({"model": state, **training(state)}, path)


def save_timm(state: State, path: Path) -> None:
    """timm's saver under DDP: averaged weights beside others."""
    worse = {f"module.{name}": torch.zeros_like(tensor) for name, tensor in state.items()}
    averaged = {f"module.{name}": tensor for name, tensor in state.items()}
    content = {"arch": "x", "state_dict": worse, "state_dict_ema": averaged, "args": argparse.Namespace(lr=1)}
    torch.save({**content, **training(state)}, path)


def deit(dim: int, depth: int, tokens: int, focused_heads: int = 0, class_token: bool = True) -> dict[str, Any]:
    """DeiT, or FLatten-DeiT, of patches of 16."""
    shapes: dict[str, Any] = {"cls_token": (1, 1, dim)} if class_token else {}
    shapes |= {"pos_embed": (1, tokens + class_token, dim)} | conv("patch_embed.proj", dim, 3, 16, 16)
    for i in range(depth):
        block = f"blocks.{i}"
        shapes |= norm(f"{block}.norm1", dim) | linear(f"{block}.attn.qkv", 3 * dim, dim)
        if focused_heads:
            shapes |= {f"{block}.attn.scale": (1, 1, dim), f"{block}.attn.positional_encoding": (1, tokens, dim)}
            shapes |= conv(f"{block}.attn.dwc", dim // focused_heads, 1, 5, 5)
        shapes |= linear(f"{block}.attn.proj", dim, dim) | norm(f"{block}.norm2", dim)
        shapes |= linear(f"{block}.mlp.fc1", 4 * dim, dim) | linear(f"{block}.mlp.fc2", dim, 4 * dim)
    return shapes | norm("norm", dim) | linear("head", 1000, dim)


class Fake(NamedTuple):
    """A small model of a family and its official checkpoint."""

    backbone: str
    options: dict[str, Any]
    shapes: Callable[[], dict[str, Any]]
    save: Callable[[State, Path], None]
    layout: str
    unexpected: tuple[str, ...] = ()

    @property
    def spec(self) -> dict[str, Any]:
        return {"name": self.backbone, **self.options}

    def state(self) -> State:
        return {name: tensor.float() for name, tensor in fill(self.shapes()).items()}


PVT = {"embed_dims": [16, 32, 40, 48], "depths": [1, 1, 2, 1], "num_heads": [1, 2, 5, 4], "mlp_ratios": [2, 2, 2, 2]}
SWIN = {"embed_dim": 24, "depths": [1, 2, 2, 1], "num_heads": [1, 2, 4, 8]}
CSWIN = {"embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [2, 4, 8, 16]}
SOFT = {"embed_dims": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "num_heads": [1, 2, 3, 4]}
RAVLT = {"embed_dims": [16, 32, 48, 64], "num_heads": [2, 2, 3, 4], "depths": [1, 1, 2, 1], "head_width": 24}
RAVLT_SIZES = [RAVLT["embed_dims"], RAVLT["num_heads"], RAVLT["depths"]]
MLLA = {"embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4]}
RAVLTS = {"rala": "ravlt_t", "nala": "nalaformer_xt", "pola_pp": "pola_pp_b0"}
FAKES = {
    "deit": Fake("deit_tiny", {"depth": 2, "embed_dim": 48}, partial(deit, 48, 2, 196), save_model, "deit"),
    "flatten_deit": Fake(
        "flatten_deit_tiny",
        {"depth": 2, "embed_dim": 48},
        partial(deit, 48, 2, 196, focused_heads=3, class_token=False),
        save_model,
        "deit",
    ),
    "pvt": Fake("pvt_tiny", PVT, partial(pvt, **PVT), save_bare, "pvt"),
    "flatten_pvt": Fake(
        "flatten_pvt_tiny",
        PVT,
        partial(pvt, **PVT, sr_ratios=(1, 1, 1, 1), focused=True, class_token=False),
        save_flatten,
        "pvt",
    ),
    "pvt_v2": Fake("pvt_v2_b0", PVT, partial(pvt_v2, **PVT), save_bare, "pvt_v2"),
    "pvt_v2_li": Fake("pvt_v2_b2_li", PVT, partial(pvt_v2, **PVT, pooled=True), save_model, "pvt_v2"),
    "flatten_pvt_v2": Fake(
        "flatten_pvt_v2_b0",
        PVT,
        partial(pvt_v2, **PVT, sr_ratios=(1, 1, 1, 1), focused=True),
        save_flatten,
        "pvt_v2",
    ),
    "swin": Fake("swin_tiny", SWIN, partial(swin, **SWIN), save_model, "swin"),
    "swin_timm": Fake("swin_tiny", SWIN, partial(swin, **SWIN, timm=True), save_bare, "swin (timm)"),
    "flatten_swin": Fake("flatten_swin_tiny", SWIN, partial(swin, **SWIN, focused_stages=2), save_flatten, "swin"),
    "pola_pvt": Fake("pola_pvt_tiny", PVT, partial(pola_pvt, **PVT), save_flatten, "pvt"),
    "pola_swin": Fake("pola_swin_tiny", SWIN, partial(pola_swin, **SWIN), save_flatten, "swin"),
    "cswin": Fake("cswin_tiny", CSWIN, partial(cswin, 16, CSWIN["depths"]), save_timm, "cswin"),
    "flatten_cswin": Fake(
        "flatten_cswin_tiny", CSWIN, partial(flatten_cswin, 16, CSWIN["depths"], 8), save_flatten, "cswin"
    ),
    "soft": Fake("soft_tiny", SOFT, lambda: soft(*soft_sizes()), save_timm, "soft"),
    **{
        kind: Fake(name, RAVLT, partial(ravlt, *RAVLT_SIZES, kind=kind, projection=24), save_model, "ravlt")
        for kind, name in RAVLTS.items()
    },
    "mlla": Fake("mlla_tiny", MLLA, partial(mlla, 16, MLLA["depths"]), save_flatten, "mlla"),
    "soft_norm": Fake("soft_norm_tiny", SOFT, lambda: soft(*soft_sizes()), save_timm, "soft"),
    **{
        f"{kind}_{family}": Fake(
            f"{kind}_{family}_tiny", options, partial(shapes, kind, **options), save_flatten, family
        )
        for kind in ("agent", "inline")
        for family, options, shapes in (
            ("pvt", PVT, agent_pvt),
            ("swin", SWIN, agent_swin),
            ("cswin", CSWIN, agent_cswin),
        )
    },
    **{
        f"{kind}_deit": Fake(
            f"{kind}_deit_tiny",
            {"depth": 2, "embed_dim": 48, "num_heads": 6},
            partial(agent_deit, kind, 48, 2, 6, deit(48, 2, 196)),
            save_flatten,
            "deit",
        )
        for kind in ("agent", "inline")
    },
}


def soft_sizes() -> tuple[list[int], list[int], list[int]]:
    return SOFT["embed_dims"], SOFT["num_heads"], SOFT["depths"]
