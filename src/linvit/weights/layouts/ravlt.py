"""Key layout of RAVLT, MAViT, NaLaFormer and PolaFormer++, for classification and dense prediction."""

from linvit.weights.layouts.layout import Layout, flat

LAYOUT = Layout(
    name="ravlt",
    marks=(r"patch_embed\.proj\.9\.weight", r"layers\.0\.blocks\.0\.ffn\.dwconv\.weight"),
    renames=(
        (r"^proj\.", "final_proj.0."),
        (r"^norm\.", "final_proj.0.norm."),
        (r"^extra_norms\.(\d)\.norm\.", r"feature_norms.\1."),  # of the dense-prediction code
        (r"^patch_embed\.", "stages.0.embed."),
        # The reference ends a stage with the merging of its patches; ours begins the next one with it.
        (r"^layers\.(\d)\.downsample\.", lambda match: f"stages.{int(match[1]) + 1}.embed."),
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
