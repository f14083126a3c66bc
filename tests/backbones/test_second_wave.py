"""T5, ViT^3, H-ViT^3, VSSD and CA-DeiT equal their reference codes on whole networks, and load their files."""

from typing import Any

import torch

import linvit
from linvit.backbones.vssd import SSD
from linvit.weights.layouts.backbones import CA_DEIT, DEIT, H_VITTT, LAYOUTS, VITTT, VSSD
from linvit.weights.layouts.layout import Layout
from tests.golden_files import Golden, both_precisions, of_case

FAMILIES: dict[str, tuple[str, Layout]] = {
    "t5": ("t5_tiny", DEIT),
    "vittt": ("vittt_tiny", VITTT),
    "h_vittt": ("h_vittt_tiny", H_VITTT),
    "vssd": ("vssd_tiny", VSSD),
    "ca_deit": ("ca_deit_tiny", CA_DEIT),
}
NAMES = {"dim": "embed_dim", "linear_attn_duality": None, "ssd_positve_dA": None, "d_state": None}


def spec(golden: Golden) -> dict[str, Any]:
    """Our spec for an official constructor."""
    official = golden.constructor
    options = {NAMES.get(name, name): value for name, value in official.items() if NAMES.get(name, name)}
    if "d_state" in official:
        attention = {**SSD, "d_state": official["d_state"]}
        options["attention"] = [attention] * 3 + ["softmax"]
    return {"name": FAMILIES[golden.meta["case"].removesuffix("_backbone")][0], **options}


@both_precisions
@of_case(*(f"{family}_backbone" for family in FAMILIES))
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    layout = FAMILIES[golden.meta["case"].removesuffix("_backbone")][1]
    state = golden.parameters()
    assert next(found for found in LAYOUTS if found.recognises(state)) is layout
    model = linvit.create_backbone(spec(golden)).to(dtype).eval()
    model.load_state_dict(layout.translate(state))
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
