"""Swin's key layouts: the reference's, which FLatten-Swin and the dense-prediction code share, and timm's."""

from linvit.weights.layouts.layout import Layout, Rename

_OURS: tuple[Rename, ...] = (
    (r"^patch_embed\.", "stages.0.embed."),
    (r"^layers\.(\d+)\.downsample\.", r"stages.\1.embed."),
    (r"\.embed\.reduction\.", ".embed.proj."),
    (r"^layers\.", "stages."),
    (r"\.attn\.(scale|positional_encoding|dwc)", r".attn.mechanism.\1"),
    (r"^norm([012])\.", r"feature_norms.\1."),  # of the dense-prediction code
    (r"^norm3\.", "norm."),
)
_DROPS = (r".*\.relative_position_index", r".*\.attn_mask")
_SWIN_V2 = r".*\.attn\.logit_scale"

SWIN = Layout(
    name="swin",
    marks=(r"layers\.0\.blocks\.0\.attn\.qkv\.weight", r"layers\.0\.downsample\.reduction\.weight"),
    renames=(
        # The reference ends a stage with the merging of its patches; ours begins the next one with it.
        (r"^layers\.(\d+)\.downsample\.", lambda match: f"layers.{int(match[1]) + 1}.downsample."),
        *_OURS,
    ),
    drops=_DROPS,
    absent=(_SWIN_V2,),
)
SWIN_TIMM = Layout(
    name="swin (timm)",
    marks=(r"layers\.0\.blocks\.0\.attn\.qkv\.weight", r"layers\.1\.downsample\.reduction\.weight"),
    renames=((r"^head\.fc\.", "head."), *_OURS),
    drops=_DROPS,
    absent=(r"layers\.0\.downsample\..*", _SWIN_V2),
)
