"""The parameter names of the official SOFT code, SOFT and SOFT++ alike."""

from linvit.weights.layouts.layout import Layout, count_from_zero

LAYOUT = Layout(
    name="soft",
    marks=(r"block1\.0\.att\.mha\.W_q\.weight",),
    renames=(
        (r"^patch_embed(\d)\.", count_from_zero("stages.{}.embed.")),
        (r"^pos_embed(\d)$", count_from_zero("stages.{}.pos_embed")),
        (r"^cls_token$", "stages.3.cls_token"),
        (r"^block(\d)\.", count_from_zero("stages.{}.blocks.")),
        (r"\.att\.mha\.W_([qv])\.", r".attn.\1."),
        (r"\.att\.mha\.ff\.", ".attn.proj."),
        (r"\.att\.mha\.attn\.Qlandmark_op\.", ".attn.mechanism.kernels.conv."),
        (r"\.att\.mha\.attn\.Qnorm_act\.0\.", ".attn.mechanism.kernels.norm."),
        (r"\.att\.mha\.attn\.", ".attn.mechanism."),
        (r"\.att\.ff(\d)\.", r".mlp.fc\1."),
        (r"\.att\.norm", ".norm"),
    ),
)
