"""Key layout of MLLA, for classification and dense prediction."""

import re

from linvit.weights.layouts.layout import Layout


def _stem(match: re.Match[str]) -> str:
    """A layer of the reference is a convolution with its BatchNorm; here they stand in a row, with ReLUs between."""
    place = 3 * int(match[2] or 0) + (match[3] == "norm")
    return f"stages.0.embed.conv{match[1]}.{place}."


LAYOUT = Layout(
    name="mlla",
    marks=(r"patch_embed\.conv1\.conv\.weight", r"layers\.0\.blocks\.0\.attn\.qk\.weight"),
    renames=(
        (r"^patch_embed\.conv(\d)\.(?:(\d)\.)?(conv|norm)\.", _stem),
        # The reference ends a stage with the merging of its patches; ours begins the next one with it.
        (r"^layers\.(\d)\.downsample\.", lambda match: f"stages.{int(match[1]) + 1}.embed."),
        (r"\.embed\.conv\.([012])\.conv\.", lambda match: f".embed.conv.{2 * int(match[1])}."),
        (r"\.embed\.conv\.2\.norm\.", ".embed.conv.5."),
        (r"^layers\.", "stages."),
        (r"\.attn\.lepe\.", ".attn.mechanism.lepe."),
        (r"\.act_proj\.", ".attn.gate."),
        (r"\.in_proj\.", ".attn.stem.in_proj."),
        (r"\.dwc\.", ".attn.stem.conv."),
        (r"\.out_proj\.", ".attn.proj."),
        (r"^norm([012])\.", r"feature_norms.\1."),  # of the dense-prediction code
        (r"^norm3\.", "norm."),
    ),
    drops=(r".*\.rope\.rotations",),
)
