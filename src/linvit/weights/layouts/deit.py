"""Key layout of DeiT, with a distillation token or without: the names are timm's, and ours."""

from linvit.weights.layouts import agent
from linvit.weights.layouts.layout import Layout

LAYOUT = Layout(
    name="deit",
    marks=(r"pos_embed", r"patch_embed\.proj\.weight", r"blocks\.0\.attn\.qkv\.weight", r"blocks\.0\.mlp\.fc1\.weight"),
    renames=(
        (r"\.attn\.(scale$|positional_encoding$|dwc\.)", r".attn.mechanism.\1"),  # FLatten-DeiT, Agent-DeiT
        *agent.RENAMES,
    ),
    conversions=agent.CONVERSIONS,
)
