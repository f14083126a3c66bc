"""A pyramid of two stages at 1/4 and 1/8 of the image, with any attention in its blocks."""

import argparse

from torch import nn

import linvit
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.layers.patch_embed import PatchEmbed


class TwoStage(linvit.Backbone):
    """Two stages of patches, positions and pre-norm blocks, on images of any size."""

    def __init__(
        self,
        in_chans=3,
        num_classes=1000,
        img_size=224,
        attention="softmax",
        drop_path_rate=0.0,
        dims=(32, 64),
        depths=(1, 1),
        num_heads=(1, 2),
    ):
        super().__init__(num_classes, dims[-1])
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size), strides=(4, 2))):
            dim, grid, stride = dims[i], linvit.Grid(size), (4, 2)[i]
            blocks = [
                Block(
                    dim,
                    linvit.AttentionLayer(dim, num_heads[i], grid, attention=spec),
                    Mlp(dim, 4 * dim),
                    rate,
                    norm_eps=1e-6,
                )
                for spec, rate in zip(specs[i], rates[i], strict=True)
            ]
            embed = PatchEmbed(in_chans, dim, kernel=stride, stride=stride)
            self.stages.append(Stage(dim, grid, embed, blocks, positions=True))
            in_chans = dim
        self.finalize(nn.LayerNorm(dims[-1]), pyramid_info(dims))


two_stage_tiny = linvit.preset(TwoStage)
two_stage_small = linvit.preset(TwoStage, dims=(64, 128), depths=(2, 4), num_heads=(2, 4))


def build(**options):
    """A factory says nothing of its options."""
    return two_stage_tiny(**options)


def stages(argv):
    """The verb `linvit stages NAME`: prints the channels and the stride of each stage."""
    parser = argparse.ArgumentParser("linvit stages", description="Channels and stride of each stage of a backbone.")
    parser.add_argument("name", nargs="?", default="two_stage_tiny", choices=["two_stage_tiny", "two_stage_small"])
    model = linvit.create_backbone(parser.parse_args(argv).name)
    for each in model.feature_info:
        print(f"{each['num_chs']} channels, stride {each['reduction']}")
