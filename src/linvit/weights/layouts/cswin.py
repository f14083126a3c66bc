"""The key layout of CSWin, classification and dense, and of FLatten-, Agent- and InLine-CSwin."""

from linvit.weights.layouts import agent
from linvit.weights.layouts.layout import Layout, count_from_zero

LAYOUT = Layout(
    name="cswin",
    marks=(r"stage1_conv_embed\.0\.weight", r"stage1\.0\.qkv\.weight"),
    renames=(
        (r"^stage1_conv_embed\.0\.", "stages.0.embed.proj."),
        (r"^stage1_conv_embed\.2\.", "stages.0.embed.norm."),
        (r"^merge(\d)\.conv\.", r"stages.\1.embed.proj."),
        (r"^merge(\d)\.norm\.", r"stages.\1.embed.norm."),
        (r"^norm4\.", "norm."),  # dense models: the last feature's norm
        (r"^norm(\d)\.", count_from_zero("feature_norms.{}.")),
        (r"^stage(\d)\.", count_from_zero("stages.{}.blocks.")),
        (r"^(stages\.\d+\.blocks\.\d+)\.(qkv|proj)\.", r"\1.attn.\2."),
        (r"\.attns\.(\d)\.get_v\.", r".attn.branches.\1.lepe."),
        (r"\.attns\.(\d)\.", r".attn.branches.\1.mechanism."),
        *agent.RENAMES,
    ),
    conversions=agent.CONVERSIONS,
)
