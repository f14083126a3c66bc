"""Key layouts of PVTv2's and FLatten-PVTv2's official checkpoints, and of timm's PVTv2."""

from linvit.weights.layouts.layout import Layout, count_from_zero
from linvit.weights.layouts.pvt import STAGES

LAYOUT = Layout(
    name="pvt_v2",
    marks=(r"patch_embed1\.proj\.weight", r"block1\.0\.attn\.q\.weight", r"block1\.0\.mlp\.dwconv\.dwconv\.weight"),
    renames=(
        *STAGES,
        (r"^norm(\d)\.", count_from_zero("stages.{}.norm.")),
        (r"\.dwconv\.dwconv\.", ".dwconv."),
    ),
)

TIMM_LAYOUT = Layout(
    name="pvt_v2 (timm)",
    marks=(
        r"patch_embed\.proj\.weight",
        r"stages\.1\.downsample\.proj\.weight",
        r"stages\.0\.blocks\.0\.mlp\.dwconv\.weight",
    ),
    renames=(
        (r"^patch_embed\.", "stages.0.embed."),
        (r"\.downsample\.", ".embed."),
        (r"\.attn\.sr\.", ".attn.sr.conv."),
        (r"\.attn\.norm\.", ".attn.sr.norm."),
    ),
)
