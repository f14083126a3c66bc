"""Key layout of DeiT (timm's names, and ours), with a distillation token or without, Agent-DeiT and InLine-DeiT."""

from linvit.weights.layouts import agent
from linvit.weights.layouts.layout import Layout

LAYOUT = Layout(
    name="deit",
    marks=(r"pos_embed", r"patch_embed\.proj\.weight", r"blocks\.0\.attn\.qkv\.weight", r"blocks\.0\.mlp\.fc1\.weight"),
    renames=(
        (r"\.attn\.(scale$|positional_encoding$|dwc\.|residual\.)", r".attn.mechanism.\1"),
        *agent.RENAMES,
    ),
    conversions=agent.CONVERSIONS,
)
