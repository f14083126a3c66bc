"""The table in docs/guides/timm.md is what the program does: `python -m tests.backbones.timm.test_table`."""

from pathlib import Path

import pytest
import timm
import torch

from linvit import UserError, replace_attention

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "timm.md"
LINEAR = "linear in the tokens, or convolutions, already"
WINDOWS = "not `mlla` with its stem, which is of the whole map"
NOTES = {
    "vit_small_patch16_224": "",
    "vit_small_patch14_dinov2": "",
    "vit_small_patch14_reg4_dinov2": "",
    "vit_base_patch16_siglip_224": "",
    "vit_base_patch16_siglip_gap_224": "",
    "vit_base_patch16_clip_224": "",
    "deit3_small_patch16_224": "",
    "vit_so150m2_patch16_reg1_gap_256": "",
    "aimv2_large_patch14_224": "",
    "test_vit4": "",
    "vitamin_small_224": "",
    "beitv2_base_patch16_224": "relative positions for what takes a bias",
    "vit_small_patch16_dinov3": "q and k are turned by its rotary positions",
    "eva02_tiny_patch14_224": "q and k are turned by its rotary positions",
    "vit_pe_core_tiny_patch16_384": "q and k are turned by its rotary positions",
    "vit_small_patch16_rope_224": "q and k are turned by its rotary positions",
    "samvit_base_patch16": f"relative positions for what takes a bias; {WINDOWS}",
    "swin_tiny_patch4_window7_224": f"relative positions and shift mask for what takes a bias; {WINDOWS}",
    "swinv2_tiny_window8_256": f"q and k of length 1 and the learnt factor for all; {WINDOWS}",
    "davit_tiny": f"the windows; attention of channels stays; {WINDOWS}",
    "hiera_tiny_224": f"not what takes its input as it is, as `inline`; {WINDOWS}",
    "maxvit_tiny_tf_224": f"windows and grids; relative positions for what takes a bias; {WINDOWS}",
    "coatnet_0_rw_224": "relative positions for what takes a bias",
    "tiny_vit_5m_224": f"distances for what takes a bias; {WINDOWS}",
    "levit_128s": "within stages; keys of 16 channels; the attention that halves the map stays",
    "pvt_v2_b0": "",
    "twins_svt_small": "windows and the whole map",
    "nextvit_small": "",
    "pit_ti_224": "",
    "crossvit_9_240": "in each branch; class tokens look at the other branch as before",
    "cait_xxs24_224": "patches; without the mixing of heads, so not `softmax`; the class token looks as before",
    "mvitv2_tiny": "",
    "naflexvit_base_patch16_gap": "images of several sizes in a batch, too",
    "xcit_nano_12_p16_224": LINEAR,
    "coat_lite_tiny": LINEAR,
    "mobilevitv2_050": LINEAR,
    "efficientvit_b0": LINEAR,
    "focalnet_tiny_srf": LINEAR,
}


def accepted(name: str) -> str:
    """Whether the model takes linear attention; if not, the message up to its advice."""
    with torch.device("meta"):
        model = timm.create_model(name)
        try:
            replace_attention(model, "linear", model.default_cfg["input_size"][1:])
        except UserError as error:
            return f"no: {str(error).partition('. Leave')[0].partition('; take')[0]}"
    return "yes"


def table() -> str:
    """The table, in Markdown."""
    rows = [f"| `{name}` | {accepted(name)} | {note} |" for name, note in NOTES.items()]
    return "\n".join(["| model | takes another attention | notes |", "|---|---|---|", *rows])


@pytest.mark.slow
def test_the_page_says_which_models_take_another_attention() -> None:
    assert table() in PAGE.read_text()


if __name__ == "__main__":
    print(table())
