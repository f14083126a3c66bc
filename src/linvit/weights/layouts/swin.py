"""Key layouts of Swin: the reference's (FLatten's, Agent's, InLine's, PolaFormer's), timm's and mmsegmentation's."""

from torch import Tensor

from linvit.weights.layouts import agent
from linvit.weights.layouts.layout import Layout, Rename

_OURS: tuple[Rename, ...] = (
    (r"^patch_embed\.", "stages.0.embed."),
    (r"^layers\.(\d+)\.downsample\.", r"stages.\1.embed."),
    (r"\.embed\.reduction\.", ".embed.proj."),
    (r"^layers\.", "stages."),
    (r"\.attn\.(scale|power|positional_encoding|dwc|residual)", r".attn.mechanism.\1"),
    (r"^norm([012])\.", r"feature_norms.\1."),  # of the dense-prediction code
    (r"^norm3\.", "norm."),
    *agent.RENAMES,
)
_DROPS = (r".*\.relative_position_index", r".*\.attn_mask")
_SWIN_V2 = r".*\.attn\.logit_scale"

SWIN = Layout(
    name="swin",
    marks=(
        r"patch_embed\.proj\.weight",
        r"layers\.0\.blocks\.0\.attn\.qkvg?\.weight",
        r"layers\.0\.downsample\.reduction\.weight",
    ),
    renames=(
        # The reference ends a stage with the merging of its patches; ours begins the next one with it.
        (r"^layers\.(\d+)\.downsample\.", lambda match: f"layers.{int(match[1]) + 1}.downsample."),
        *_OURS,
    ),
    drops=_DROPS,
    absent=(_SWIN_V2,),
    conversions=agent.CONVERSIONS,
)


def merged_by_patch(tensor: Tensor) -> Tensor:
    """The last axis of 4 C entries, which later mmsegmentation orders by channel, then by row and column of the patch.

    The reference orders it by column, row, channel.
    """
    patches: Tensor = tensor.unflatten(-1, (-1, 4)).movedim(-1, -2)  # (..., 4, C)
    return patches[..., [0, 2, 1, 3], :].flatten(-2)


SWIN_TIMM = Layout(
    name="swin (timm)",
    marks=(r"layers\.0\.blocks\.0\.attn\.qkv\.weight", r"layers\.1\.downsample\.reduction\.weight"),
    renames=((r"^head\.fc\.", "head."), *_OURS),
    drops=_DROPS,
    absent=(r"layers\.0\.downsample\..*", _SWIN_V2),
)
SWIN_MMSEG = Layout(
    name="swin (mmsegmentation)",
    marks=(r"stages\.0\.blocks\.0\.attn\.w_msa\.qkv\.weight", r"stages\.0\.downsample\.reduction\.weight"),
    renames=(
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^stages\.", "layers."),
        (r"\.attn\.w_msa\.", ".attn."),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
        *SWIN.renames,
    ),
    drops=_DROPS,
    conversions=((r"stages\.\d+\.downsample\.(reduction\.weight|norm\.(weight|bias))", merged_by_patch),),
)
