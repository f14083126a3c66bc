"""docs/explanation/hybrid_matrices.svg: one head of a pretrained ViT by full, windowed, linear and hybrid attention.

    python benchmarks/hybrid_matrices.py RESULTS --weights FILE --images FOLDER docs/explanation/hybrid_matrices.svg

Network, images and training of single layers are those of `real_teacher.py`, which says where FILE and FOLDER are from.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from real_teacher import Experiment, converted, layer_errors, seen, teacher, transfer

from linvit import Grid
from linvit.analysis import attention_matrix
from linvit.experiments.plots import svg

BLOCK, HEAD, SIZE, STEPS = 5, 0, 112, 60
SHOWN = {
    "full softmax": None,
    "windows of 4 x 4": {"name": "window", "window_size": 4},
    "linear (hedgehog)": "hedgehog",
    "hybrid (lolcats, 4 x 4)": {"name": "lolcats", "window_size": 4, "shift": True},
}


def main() -> None:
    """Trains the layers and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = teacher(args.weights, SIZE)
    train, held = seen(model, args.images, SIZE, args.results)
    grid = Grid((SIZE // 14, SIZE // 14), num_prefix=1)
    figure = Figure((11, 3.4), layout="constrained")
    for place, (title, spec) in enumerate(SHOWN.items()):
        one = Experiment("softmax" if spec is None else spec, steps=0 if spec is None else STEPS)
        student, new = converted(model, one)
        student(held.images[:1].float())  # tells layers their grid
        block = student.blocks[BLOCK]
        if spec is not None:
            transfer(block, model.blocks[BLOCK], BLOCK, train, one, new, args.results)
        error = layer_errors(student, held, [BLOCK])[BLOCK]
        layer = block.attn
        with torch.no_grad():
            tokens = block.norm1(held.stream[BLOCK, :1].float())
            q, k, _ = layer.qkv(tokens).unflatten(-1, (3, 6, 64)).permute(2, 0, 3, 1, 4)
            matrix = attention_matrix(layer.mechanism, q, k, grid)[0, HEAD]
        print(f"{title}: error {error:.3f}, row sums {matrix.sum(-1).min():.3f} to {matrix.sum(-1).max():.3f}")
        axes = figure.add_subplot(1, len(SHOWN), place + 1)
        axes.imshow(matrix.clamp_min(1e-4).log10(), cmap="viridis", vmin=-3.5, vmax=-0.5, interpolation="nearest")
        axes.set_title(f"{title}\nerror {error:.2f}" if spec is not None else title, fontsize=11)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("keys")
        if not place:
            axes.set_ylabel("queries")
    args.picture.write_text(svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
