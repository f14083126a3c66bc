"""Key layout of MACU-Net's official code: the whole network."""

import re

from linvit.weights.layouts.layout import Layout, count_from_zero


def _block(match: re.Match[str]) -> str:
    """Block j of the encoder's level i; all but the first level begin with a pooling that counts."""
    level, block = int(match[1]), int(match[2])
    return f"backbone.stages.{level - 1}.blocks.{block - (level > 1)}."


def _up(match: re.Match[str]) -> str:
    """The transposed convolution `deconv42` ends at level 2 and begins below level 4; `deconv4` ends at level 4."""
    source, target = int(match[1]), int(match[2] or match[1])
    return f"head.ups.{source}_{target - 1}."


LAYOUT = Layout(
    name="macunet",
    marks=(r"conv1\.0\.squre\.weight", r"skblock1\.fc11\.weight", r"deconv41\.weight"),
    renames=(
        (r"^conv([1-5])\.(\d)\.", _block),
        (r"^conv(\d)(\d)\.1\.", lambda match: f"head.downs.{int(match[1]) - 1}_{int(match[2]) - 1}."),
        (r"^conv([6-9])\.", lambda match: f"head.blocks.{9 - int(match[1])}."),
        (r"^conv10\.", "head.classifier."),
        (r"^deconv(\d)(\d?)\.", _up),
        (r"^skblock(\d)\.", count_from_zero("head.attentions.{}.")),
        (r"\.fc1([12])\.", lambda match: f".of_means.{2 * int(match[1]) - 2}."),
        (r"\.fc2([12])\.", lambda match: f".of_maxima.{2 * int(match[1]) - 2}."),
        (r"\.squre\.", ".square."),
        (r"\.cross_ver\.", ".row."),
        (r"\.cross_hor\.", ".column."),
        (r"\.bn\.", ".norm."),
    ),
)
