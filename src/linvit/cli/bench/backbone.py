"""`linvit bench backbone`: time, memory and operations of backbones over the image size, beside their accuracy."""

from linvit.cli.bench.options import add_options, finish, measured, parse_sizes, settings
from linvit.cli.spec import read_spec, read_value
from linvit.experiments.bench.backbone import accuracy_plot, backbone_costs, backbone_label, published
from linvit.experiments.bench.report import CostReport
from linvit.registry import backbones
from linvit.terminal import argument_parser

NAMES = ("deit_tiny", "flatten_deit_tiny", "pvt_tiny", "flatten_pvt_tiny", "swin_tiny", "flatten_swin_tiny")
SIZES = "224,320,448"
EPILOG = """examples:
  linvit bench backbone                      DeiT, PVT and Swin, with their own
                                             and with focused attention
  linvit bench backbone swin_tiny flatten_swin_tiny --img_sizes 224,384,512x768
  linvit bench backbone deit_tiny '{name: timm, model: vit_tiny_patch16_224}'
  linvit bench backbone pvt_v2_b0 --attention hydra --forward_only --budget 20
  linvit bench backbone deit_tiny hydra_deit_base --device cuda --batch 64
  linvit bench backbone swin_tiny --img_sizes 224 --batch 8 --compile
  linvit bench backbone my_package.my_module:MyBackbone

A training step is forward, cross entropy, backward and AdamW. Tables and plots
are those of linvit bench attention, over the image size; the crossover is with
the first backbone. --compile and --no_recompute measure each backbone once more
in that mode, in the same rounds, with ratios to the same backbone eager.

accuracy.svg shows ImageNet-1K top-1 as published by the authors (linvit
measured none of it) over the time measured here, of those backbones that have
one.
"""


def main(argv: list[str]) -> int:
    """Runs `linvit bench backbone`; prints the tables, returns 0, or 130 after Ctrl-C."""
    parser = argument_parser("linvit bench backbone", __doc__, EPILOG)
    parser.add_argument("names", nargs="*", help="names, package.module:Class, or {name: ..., option: value}")
    parser.add_argument("--img_sizes", default=SIZES, help="image sizes, a side or HxW, with commas (%(default)s)")
    parser.add_argument("--attention", metavar="SPEC", help="another attention in all: NAME, {name: ...}, or a list")
    add_options(parser, batch=1, budget=60)
    args = parser.parse_intermixed_args(argv)
    specs = [read_spec(backbones, name, None) for name in args.names or NAMES]
    attention = None if args.attention is None else read_value("--attention", args.attention)
    sizes = parse_sizes("--img_sizes", args.img_sizes)
    how = settings(args)._replace(optimizer=True)
    what = "backbones with classifier" + ("" if args.attention is None else f", attention {args.attention}")
    costs, known = measured(args, what, backbone_costs, specs, sizes, how, attention=attention)
    report = CostReport("Backbones", "pixels", costs, known, [backbone_label(specs[0])])
    top1 = published(report) if attention is None else {}
    return finish(report, args.output, {"accuracy.svg": accuracy_plot(report, top1)} if top1 else {})
