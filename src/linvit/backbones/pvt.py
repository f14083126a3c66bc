"""PVT: a pyramid vision transformer with spatial reduction of keys and values, and any attention in its blocks.

Paper: Wang et al. 2021, "Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions".
The FLatten presets follow Han et al. 2023: focused attention in every block, no spatial reduction. So do the Agent and
InLine presets of Han et al. 2024, the latter with twice as many heads, and the PolaFormer presets of Meng et al. 2025.

As in the reference code the patch embeddings' and reductions' LayerNorms have eps 1e-5, all others 1e-6. FLatten-PVT
differs from its host: no class token, the mean of the patch tokens, and a final norm that is never applied (Agent-PVT
and InLine-PVT have none). Its "PVT-B" is `flatten_pvt_large`. Published with `drop_path_rate` 0.1 (tiny, small) and 0.3
(medium, large).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import FeedForward, feed_forward
from linvit.layers.patch_embed import PatchEmbed
from linvit.registry import Spec, preset


class PVT(Backbone):
    """PVT: four stages of strides 4, 8, 16 and 32; the class token is added in the last.

    For images of any size and aspect ratio: position embeddings of other grids are interpolated (bilinear) per stage;
    planes that are not a multiple of the patch are zero-padded on the right and at the bottom. The reference decides
    by the token count of stage 1 whether to interpolate, which fails at 448 x 448 for a model of 224; here each stage
    compares its own grid.

    Args:
        img_size: Side, or (H, W), of the position embeddings.
        sr_ratios: Spatial reduction of each stage: keys and values come from patches merged R x R; 1 is none. None is
            8, 4, 2, 1, except in blocks whose mechanism needs as many keys as queries (SOFT, Poly-NL, ...).
        class_token: Prepend a learnable class token in stage 4.
        global_pool: Input of the classifier: "token" (the class token) or "avg" (the mean of the patch tokens).
        final_norm: Apply the final norm. False keeps its parameters, which checkpoints contain, without applying or
            training them; None has none.
        class_position: Without a class token, keep its unused row in the position embeddings of stage 4, as in the
            reference for dense prediction and its checkpoints.
    """

    dense: ClassVar[Mapping[str, Any]] = {
        "class_token": False,
        "global_pool": "avg",
        "final_norm": False,
        "class_position": True,
    }

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = "softmax",
        drop_path_rate: float = 0.0,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        ffn: FeedForward = "mlp",
        sr_ratios: Sequence[int] | None = None,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        class_token: bool = True,
        global_pool: str = "token",
        final_norm: bool | None = True,
        class_position: bool = False,
    ) -> None:
        ratios = (8, 4, 2, 1) if sr_ratios is None else sr_ratios
        sizes = {"embed_dims": embed_dims, "num_heads": num_heads, "mlp_ratios": mlp_ratios}
        check_stages(4, depths=depths, sr_ratios=ratios, **sizes)
        super().__init__(num_classes, embed_dims[-1], global_pool, num_prefix_tokens=int(class_token))
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop, "qk_norm": qk_norm}
        shared["sr_required"] = sr_ratios is not None

        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size))):
            dim, stride = embed_dims[i], 2 if i else 4
            grid = Grid(size, num_prefix=self.num_prefix_tokens if i == 3 else 0)
            blocks = [
                Block(
                    dim,
                    AttentionLayer(dim, num_heads[i], grid, attention=spec, sr_ratio=ratios[i], **shared),
                    feed_forward(ffn, dim, int(dim * mlp_ratios[i])),
                    rate,
                    norm_eps=1e-6,
                )
                for spec, rate in zip(specs[i], rates[i], strict=True)
            ]
            embed = PatchEmbed(in_chans, dim, stride, stride)
            spare = class_position and i == 3 and not class_token
            self.stages.append(Stage(dim, grid, embed, blocks, positions=True, spare_position=spare))
            in_chans = dim
        norm = (nn.LayerNorm if final_norm else UnusedNorm)(embed_dims[-1], eps=1e-6)
        self.finalize(nn.Identity() if final_norm is None else norm, pyramid_info(embed_dims))

    def no_weight_decay(self) -> set[str]:
        """Returns names of parameters without weight decay: only the class token."""
        return {"stages.3.cls_token"} & dict(self.named_parameters()).keys()


class UnusedNorm(nn.LayerNorm):
    """Identity with the parameters of a LayerNorm, which official checkpoints contain and no model applies."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x."""
        return x


_mean = partial(
    PVT,
    sr_ratios=(1, 1, 1, 1),
    class_token=False,
    global_pool="avg",
    final_norm=False,
    class_position=False,
)

pvt_tiny = preset(PVT, depths=(2, 2, 2, 2))
pvt_small = preset(PVT, depths=(3, 4, 6, 3))
pvt_medium = preset(PVT, depths=(3, 4, 18, 3))
pvt_large = preset(PVT, depths=(3, 8, 27, 3))
flatten_pvt_tiny = preset(_mean, attention="focused", depths=(2, 2, 2, 2))
flatten_pvt_small = preset(_mean, attention="focused", depths=(3, 4, 6, 3))
flatten_pvt_medium = preset(_mean, attention="focused", depths=(3, 4, 18, 3))
flatten_pvt_large = preset(_mean, attention="focused", depths=(3, 8, 27, 3))

_agents = tuple({"name": "agent", "agents": agents} for agents in (9, 16, 49, 49))
_agent = partial(_mean, attention=_agents, final_norm=None)
agent_pvt_tiny = preset(_agent, depths=(2, 2, 2, 2))
agent_pvt_small = preset(_agent, depths=(3, 4, 6, 3))
agent_pvt_medium = preset(_agent, depths=(3, 4, 18, 3))
agent_pvt_medium_256 = preset(agent_pvt_medium, img_size=256)
agent_pvt_large = preset(_agent, depths=(3, 8, 27, 3))

_inline = partial(_mean, attention="inline", num_heads=(2, 4, 10, 16), final_norm=None)
inline_pvt_tiny = preset(_inline, depths=(2, 2, 2, 2))
inline_pvt_small = preset(_inline, depths=(3, 4, 6, 3))
inline_pvt_medium = preset(_inline, depths=(3, 4, 18, 3))
inline_pvt_large = preset(_inline, depths=(3, 8, 27, 3))

pola_pvt_tiny = preset(_mean, attention="pola", depths=(2, 2, 2, 2))
pola_pvt_small = preset(_mean, attention="pola", depths=(3, 4, 6, 3))
pola_pvt_medium = preset(_mean, attention="pola", depths=(3, 4, 18, 3))
pola_pvt_large = preset(_mean, attention="pola", depths=(3, 8, 27, 3))
