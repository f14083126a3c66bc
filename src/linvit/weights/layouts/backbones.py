"""Parameter names in official checkpoints of backbones, and their translation to linvit's."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from linvit.weights.layouts.layout import Layout, Rename, count_from_zero, flat

DEIT = Layout(
    name="deit",
    marks=(r"pos_embed", r"patch_embed\.proj\.weight", r"blocks\.0\.attn\.qkv\.weight", r"blocks\.0\.mlp\.fc1\.weight"),
    renames=((r"\.attn\.(scale$|positional_encoding$|dwc\.|residual\.|w[123]$|[qk]_conv2d\.)", r".attn.mechanism.\1"),),
)
"""Names of timm and of linvit's DeiT, with or without a distillation token; also Agent-DeiT, InLine-DeiT and T5."""

CA_DEIT = Layout(
    name="ca_deit",
    marks=(r"blocks\.0\.cpe\.weight", r"blocks\.0\.attn\.gate\.0\.weight"),
    renames=((r"\.cpe\.", ".cpe1."), (r"\.attn\.gate\.0\.", ".attn.gate.")),
)

PVT_STAGES: tuple[Rename, ...] = (
    (r"^patch_embed(\d)", count_from_zero("stages.{}.embed")),
    (r"^block(\d)", count_from_zero("stages.{}.blocks")),
    (r"\.attn\.sr\.", ".attn.sr.conv."),
    (r"\.attn\.norm\.", ".attn.sr.norm."),
    (r"\.attn\.(scale$|power$|positional_encoding$|dwc\.|residual\.)", r".attn.mechanism.\1"),
)
"""Renames common to PVT and PVTv2."""

PVT = Layout(
    name="pvt",
    marks=(r"pos_embed1", r"patch_embed1\.proj\.weight", r"block1\.0\.attn\.qg?\.weight"),
    renames=(
        *PVT_STAGES,
        (r"^pos_embed(\d)", count_from_zero("stages.{}.pos_embed")),
        (r"^cls_token$", "stages.3.cls_token"),
    ),
)
"""Names of PVT, FLatten-PVT, Agent-PVT, InLine-PVT and Pola-PVT."""
PVT_V2 = Layout(
    name="pvt_v2",
    marks=(r"patch_embed1\.proj\.weight", r"block1\.0\.attn\.q\.weight", r"block1\.0\.mlp\.dwconv\.dwconv\.weight"),
    renames=(
        *PVT_STAGES,
        (r"^norm(\d)\.", count_from_zero("stages.{}.norm.")),
        (r"\.dwconv\.dwconv\.", ".dwconv."),
    ),
)
PVT_V2_TIMM = Layout(
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

NEXT_STAGE: Rename = (r"^layers\.(\d+)\.downsample\.", lambda match: f"stages.{int(match[1]) + 1}.embed.")
"""References end a stage with the merging of its patches; linvit and timm begin the next stage with it."""
DENSE_NORMS: tuple[Rename, ...] = ((r"^(?:out)?norm([012])\.", r"feature_norms.\1."), (r"^(?:out)?norm3\.", "norm."))
"""Norms of features in code for dense prediction."""

_SWIN: tuple[Rename, ...] = (
    (r"^patch_embed\.", "stages.0.embed."),
    (r"^layers\.(\d+)\.downsample\.", r"stages.\1.embed."),
    (r"\.embed\.reduction\.", ".embed.proj."),
    (r"^layers\.", "stages."),
    (r"\.attn\.(scale|power|positional_encoding|dwc|residual)", r".attn.mechanism.\1"),
    *DENSE_NORMS,
)

_SWIN_DROPS = (r".*\.relative_position_index", r".*\.attn_mask")
_SWIN_V2 = r".*\.attn\.logit_scale"

SWIN = Layout(
    name="swin",
    marks=(
        r"patch_embed\.proj\.weight",
        r"layers\.0\.blocks\.0\.attn\.qkvg?\.weight",
        r"layers\.0\.downsample\.reduction\.weight",
    ),
    renames=(NEXT_STAGE, *_SWIN),
    drops=_SWIN_DROPS,
    absent=(_SWIN_V2,),
)


def merged_by_patch(tensor: Tensor) -> Tensor:
    """Reorders the last axis of 4 C entries, in newer mmsegmentation by channel, then by row and column of the patch.

    The reference orders it by column, row, channel.
    """
    patches: Tensor = tensor.unflatten(-1, (-1, 4)).movedim(-1, -2)  # (..., 4, C)
    return patches[..., [0, 2, 1, 3], :].flatten(-2)


SWIN_TIMM = Layout(
    name="swin (timm)",
    marks=(r"layers\.0\.blocks\.0\.attn\.qkv\.weight", r"layers\.1\.downsample\.reduction\.weight"),
    renames=((r"^head\.fc\.", "head."), *_SWIN),
    drops=_SWIN_DROPS,
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
    drops=_SWIN_DROPS,
    conversions=((r"stages\.\d+\.downsample\.(reduction\.weight|norm\.(weight|bias))", merged_by_patch),),
)

CSWIN = Layout(
    name="cswin",
    marks=(r"stage1_conv_embed\.0\.weight", r"stage1\.0\.qkv\.weight"),
    renames=(
        (r"^stage1_conv_embed\.0\.", "stages.0.embed.proj."),
        (r"^stage1_conv_embed\.2\.", "stages.0.embed.norm."),
        (r"^merge(\d)\.conv\.", r"stages.\1.embed.proj."),
        (r"^merge(\d)\.norm\.", r"stages.\1.embed.norm."),
        (r"^norm4\.", "norm."),  # dense models: the norm of the last feature
        (r"^norm(\d)\.", count_from_zero("feature_norms.{}.")),
        (r"^stage(\d)\.", count_from_zero("stages.{}.blocks.")),
        (r"^(stages\.\d+\.blocks\.\d+)\.(qkv|proj)\.", r"\1.attn.\2."),
        (r"\.attns\.(\d)\.get_v\.", r".attn.branches.\1.lepe."),
        (r"\.attns\.(\d)\.", r".attn.branches.\1.mechanism."),
    ),
)
"""Names of CSwin, FLatten-, Agent- and InLine-CSwin, for classification and dense prediction."""

SOFT = Layout(
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
"""Names of SOFT and SOFT++."""

RAVLT = Layout(
    name="ravlt",
    marks=(r"patch_embed\.proj\.9\.weight", r"layers\.0\.blocks\.0\.ffn\.dwconv\.weight"),
    renames=(
        (r"^proj\.", "final_proj.0."),
        (r"^norm\.", "final_proj.0.norm."),
        (r"^extra_norms\.(\d)\.norm\.", r"feature_norms.\1."),  # of the dense-prediction code
        (r"^patch_embed\.", "stages.0.embed."),
        NEXT_STAGE,
        (r"\.embed\.reduction\.", ".embed.proj.0."),
        (r"\.embed\.norm\.", ".embed.proj.1."),
        (r"^layers\.", "stages."),
        (r"\.pos\.", ".cpe1."),
        (r"\.norm([12])\.norm\.", r".norm\1."),
        (r"\.attn\.qkvo\.", ".attn.qkvg."),
        (r"\.attn\.out_proj\.", ".attn.proj."),
        (r"\.attn\.ln\.", ".attn.out_norm."),
        (r"\.attn\.(lepe\.|s[12]$)", r".attn.mechanism.\1"),
        (r"\.ffn\.dwconv\.", ".mlp.conv."),
        (r"\.ffn\.", ".mlp."),
        (r"\.gamma_([12])$", r".scale\1.gamma"),
    ),
    drops=(r"layers\.\d\.RoPE(_linear)?\.angle",),
    conversions=((r"(head|proj|.*\.(qkvo|attn\.proj|fc[12]))\.weight|.*\.gamma_[12]", flat),),
)
"""Names of RAVLT, MAViT, NaLaFormer and PolaFormer++, for classification and dense prediction."""


def _stem(match: re.Match[str]) -> str:
    """Names a layer of the stem: the reference nests a convolution and its BatchNorm; linvit has a flat sequence."""
    place = 3 * int(match[2] or 0) + (match[3] == "norm")
    return f"stages.0.embed.conv{match[1]}.{place}."


MLLA = Layout(
    name="mlla",
    marks=(r"patch_embed\.conv1\.conv\.weight", r"layers\.0\.blocks\.0\.attn\.qk\.weight"),
    renames=(
        (r"^patch_embed\.conv(\d?)\.(?:(\d)\.)?(conv|norm)\.", _stem),
        NEXT_STAGE,
        (r"\.embed\.conv\.([012])\.conv\.", lambda match: f".embed.conv.{2 * int(match[1])}."),
        (r"\.embed\.conv\.2\.norm\.", ".embed.conv.5."),
        (r"^layers\.", "stages."),
        (r"\.attn\.lepe\.", ".attn.mechanism.lepe."),
        (r"\.act_proj\.", ".attn.gate."),
        (r"\.in_proj\.", ".attn.stem.in_proj."),
        (r"\.dwc\.", ".attn.stem.conv."),
        (r"\.out_proj\.", ".attn.proj."),
        *DENSE_NORMS,
    ),
    drops=(r".*\.rope\.rotations",),
)


def vssd_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits one projection `in_proj` of the reference into gate, values, keys, queries and dt."""
    parts = dict(state)
    for name in [key for key in state if key.endswith(".in_proj.weight")]:
        layer = name.removesuffix("in_proj.weight")
        inner, heads = state[f"{layer}out_proj.weight"].shape[1], len(state[f"{layer}A_log"])
        gate, v, shared, dt = (rows := parts.pop(name)).split([inner, inner, len(rows) - 2 * inner - heads, heads])
        k, q = shared.chunk(2)
        parts |= {f"{layer}gate.weight": gate, f"{layer}qkv.weight": torch.cat([q, k, v]), f"{layer}dt.weight": dt}
    return parts


VSSD = Layout(
    name="vssd",
    marks=(r"patch_embed\.conv1\.conv\.weight", r"layers\.0\.blocks\.0\.attn\.in_proj\.weight"),
    split=vssd_parts,
    renames=(
        *MLLA.renames[:5],  # of the stem and the stages
        (r"\.attn\.(to_)?out(_proj)?\.", ".attn.proj."),
        (r"\.attn\.to_qkv\.", ".attn.qkv."),
        (r"\.attn\.norm\.", ".attn.out_norm."),
        (r"\.attn\.dt_bias$", ".attn.dt.bias"),
        (r"\.attn\.(A_log|D|dt\.|conv2d\.)", r".attn.mechanism.\1"),
        *DENSE_NORMS,
    ),
)


def vittt_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits one projection `qkv` of the reference into the projections of the heads and the additional one."""
    parts = dict(state)
    for name in [key for key in state if ".attn.qkv." in key]:
        layer, kind = name.split("qkv.")
        further = 3 * len(state[f"{layer}w3"])
        parts[name], parts[f"{layer}qkv2.{kind}"] = state[name].split([len(state[name]) - further, further])
    return parts


_VITTT: tuple[Rename, ...] = ((r"\.cpe\.", ".cpe1."), (r"\.attn\.(w[123]$|qkv2\.)", r".attn.mechanism.\1"))

VITTT = Layout(
    name="vittt",
    marks=(r"blocks\.0\.attn\.w3", r"blocks\.0\.cpe\.weight"),
    split=vittt_parts,
    renames=_VITTT,
)

H_VITTT = Layout(
    name="h_vittt",
    marks=(r"patch_embed\.conv\.4\.conv\.weight", r"layers\.0\.blocks\.0\.attn\.w3"),
    split=vittt_parts,
    renames=(
        *MLLA.renames[:5],  # of the stem and the stages
        (r"\.mlp\.dwc\.", ".mlp.conv."),
        *DENSE_NORMS,
        *_VITTT,
    ),
    drops=(r".*\.rope\.rotations",),
)


def lite_mla_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Separates q, k and v, interleaved by head in the reference, and orders outputs by head instead of by scale."""
    parts = dict(state)
    for name in [key for key in state if key.endswith(".aggreg.0.1.weight")]:
        layer, width = name.removesuffix("aggreg.0.1.weight"), state[name].shape[1]

        def apart(key: str, width: int = width) -> Tensor:
            rows: Tensor = parts.pop(key).unflatten(0, (-1, 3, width))  # (h, 3, d, ...)
            return rows.movedim(1, 0).flatten(1, 2)

        for key in [key for key in state if key.startswith(f"{layer}aggreg.")]:
            for letter, rows in zip("qkv", apart(key), strict=True):
                parts[key.replace("aggreg", f"mechanism.{letter}_aggregations")] = rows
        parts[f"{layer}qkv.weight"] = apart(f"{layer}qkv.conv.weight").flatten(0, 1)
        heads, weight = len(state[name]) // (3 * width), parts.pop(f"{layer}proj.conv.weight")
        parts[f"{layer}proj.weight"] = weight.unflatten(1, (-1, heads, width)).transpose(1, 2).flatten(1)
    return parts


def _stem_place(match: re.Match[str]) -> str:
    """Names the first convolution of the stem and those on residual paths, which timm counts separately."""
    return f"stages.0.embed.conv.0.{int(match[2] or 0) + (match[1] == 'stem.res')}."


def _conv_block(match: re.Match[str]) -> str:
    """Names a convolution of a stage: in the first stage they follow the stem; elsewhere they are the first, or all."""
    return f"stages.{match[1]}.embed.conv.{int(match[2]) + (match[1] == '0')}."


EFFICIENTVIT = Layout(
    name="efficientvit",
    marks=(r".*stages\.2\..*\.1\.context_module\.main\.aggreg\.0\.0\.weight",),
    split=lite_mla_parts,
    renames=(
        (r"^(backbone\.input_stem\.op_list\.|stem\.in_conv\.|stem\.res)(\d?)\.?(main\.)?", _stem_place),
        (r"^backbone\.(stages\.\d\.)op_list\.", r"\1blocks."),
        (r"^stages\.(\d)\.blocks\.(\d+)\.main\.", _conv_block),
        (r"(?<=\.blocks\.)(\d+)\.(?=(context|local)_module)", count_from_zero("{}.")),
        (r"context_module\.main\.", "attn."),
        (r"local_module\.main\.(\w+)\.conv\.", r"mlp.\1."),
        (r"local_module\.main\.", "mlp."),
        (r"^head\.(in_conv|op_list\.0)\.(conv\.)?", "final_proj.0."),
        (r"^head\.(op_list\.2\.linear|classifier\.0)\.", "pre_logits.0."),
        (r"^head\.(op_list\.2\.norm|classifier\.1)\.", "pre_logits.1."),
        (r"^head\.(op_list\.3\.linear|classifier\.4)\.", "head."),
    ),
    conversions=(
        (
            r".*\.(qkv|proj)\.weight|.*\.local_module\.main\.(inverted|point)_conv\.conv\.weight|head.*\.conv\.weight",
            flat,
        ),
    ),
)
"""Names in MIT's files and in timm's."""

LAYOUTS: tuple[Layout, ...] = (
    *(DEIT, CA_DEIT, PVT, PVT_V2, PVT_V2_TIMM, SWIN, SWIN_TIMM, SWIN_MMSEG, CSWIN, SOFT, RAVLT, MLLA, VSSD, VITTT),
    H_VITTT,
    EFFICIENTVIT,
)
"""All layouts, in the order in which they are tried."""
