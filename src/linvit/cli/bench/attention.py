"""`linvit bench attention`: time, memory and operations of mechanisms over the number of tokens."""

from linvit.analysis.roofline import GPUS
from linvit.cli.bench.options import add_options, finish, measured, parse_sizes, settings, text_table
from linvit.cli.spec import read_spec
from linvit.errors import check_number
from linvit.experiments.bench.attention import BASELINES, attention_costs, record_kernels, roofline
from linvit.experiments.bench.report import CostReport
from linvit.registry import attentions
from linvit.terminal import argument_parser, reflow

GRIDS = "14x14,14x28,28x28,28x56,56x56"
EPILOG = """examples:
  linvit bench attention                     all mechanisms up to 3,136 tokens:
                                             minutes on a CPU
  linvit bench attention linear focused --grids 14,28,56,56x112,112
  linvit bench attention '{name: focused, focusing_factor: 4}' focused
  linvit bench attention my_package.my_module:MyAttention
  linvit bench attention --device cuda --dtype bfloat16 --autocast --layer
  linvit bench attention focused linear --layer --batch 4 --grids 56 --compile
                                             torch.compile: how much faster?
  linvit bench attention focused linear --device cuda --dtype bfloat16 --kernel
                                             Triton's kernels: quicker here?
  linvit bench attention focused linear --no_recompute --layer --batch 4
                                             recomputing in backward: what does
                                             it save, and what does it cost?

Beside the mechanisms are measured torch's scaled_dot_product_attention
("torch's SDPA") and a naive softmax. Printed are the medians, from which
number of tokens on a mechanism costs less than these (the crossover), and how
its costs grow with the number of tokens (the exponent). Tables with quartiles
(Markdown, CSV) and plots (SVG) are written.

Time is that of whole calls, taken in turns, in as many rounds as the budget
allows, at least three. Memory is what a call allocates beyond its inputs and
weights. A size that cannot be measured is left out, and the tables say why.
Ctrl-C ends the measurement and keeps what is measured.
"""

PREDICTION = (
    "Forward + backward. Operators: of most, torch launches one kernel. GB: of the tensors that they read and write. "
    "GFLOP: of products. ms on a GPU are PREDICTED, not measured: what these take at least at the peaks of its data "
    "sheet in bfloat16, without what starting an operator costs:",
    *(
        f"{name}: {gpu.flops / 1e12:g} TFLOP/s, {gpu.bandwidth / 1e12:g} TB/s ({gpu.source})"
        for name, gpu in GPUS.items()
    ),
)


def main(argv: list[str]) -> int:
    """Runs `linvit bench attention`; prints the tables, returns 0, or 130 after Ctrl-C."""
    parser = argument_parser("linvit bench attention", __doc__, EPILOG)
    parser.add_argument("names", nargs="*", help="names, package.module:Class, or {name: ..., option: value}; all")
    parser.add_argument("--grids", default=GRIDS, help="patch grids, a side or HxW, with commas (%(default)s)")
    parser.add_argument("--dim", type=int, default=96, help="channels over all heads (%(default)s, as in Swin-T)")
    parser.add_argument("--heads", type=int, default=3, help="heads (%(default)s)")
    parser.add_argument("--layer", action="store_true", help="with the projections of the layer around it")
    add_options(parser, batch=1, budget=60)
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="measure nothing: count operators, bytes and FLOPs, and predict the least time on several GPUs",
    )
    args = parser.parse_intermixed_args(argv)
    check_number("--dim", args.dim, at_least=1, whole=True)
    check_number("--heads", args.heads, at_least=1, whole=True)
    specs = [read_spec(attentions, name, None) for name in args.names or attentions.names()]
    grids = parse_sizes("--grids", args.grids)
    what = f"{'attention layers' if args.layer else 'mechanisms alone'}, {args.dim} channels, {args.heads} heads"
    shape = {"dim": args.dim, "num_heads": args.heads, "layer": args.layer}
    if args.roofline:
        rows = roofline(specs, grids, settings(args), **shape)
        print("\n".join(reflow(line) for line in PREDICTION), text_table(rows), sep="\n\n")
        return 0
    costs, known = measured(args, what, attention_costs, specs, grids, settings(args), **shape)
    code = finish(CostReport("Attention", "tokens N", costs, known, list(BASELINES)), args.output)
    if "triton" in args.modes:
        print(reflow(record_kernels(costs, specs, settings(args))))
    return code
