"""Key layout of PVT's, FLatten-PVT's, Agent-PVT's, InLine-PVT's and Pola-PVT's official checkpoints."""

from linvit.weights.layouts import agent
from linvit.weights.layouts.layout import Layout, Rename, count_from_zero

STAGES: tuple[Rename, ...] = (
    (r"^patch_embed(\d)", count_from_zero("stages.{}.embed")),
    (r"^block(\d)", count_from_zero("stages.{}.blocks")),
    (r"\.attn\.sr\.", ".attn.sr.conv."),
    (r"\.attn\.norm\.", ".attn.sr.norm."),
    (r"\.attn\.(scale$|power$|positional_encoding$|dwc\.|residual\.)", r".attn.mechanism.\1"),
)
"""What PVT and PVTv2 have in common."""

LAYOUT = Layout(
    name="pvt",
    marks=(r"pos_embed1", r"patch_embed1\.proj\.weight", r"block1\.0\.attn\.qg?\.weight"),
    renames=(
        *STAGES,
        (r"^pos_embed(\d)", count_from_zero("stages.{}.pos_embed")),
        (r"^cls_token$", "stages.3.cls_token"),
        *agent.RENAMES,
    ),
    conversions=agent.CONVERSIONS,
)
