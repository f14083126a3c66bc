"""Images of several sizes: packed against padded and against one after the other, on a CPU.

    python benchmarks/packed.py            # 192 channels, two blocks, 16 images of 128 to 448 pixels a side
    python benchmarks/packed.py --small 8  # 64 channels, four blocks, 32 images of 32 to 80 pixels, patches of 8
    python benchmarks/packed.py --small 8 --attention '{"name": "sla", "window_size": 4}'

timm's NaFlexVit with linear attention computes the same logits in three ways: padded to the longest image with a mask
of the keys (timm's own form), packed (`linvit.forward_images`), and image by image. With `--small` a DeiT computes them
packed, one size after the other (as mechanisms without `packs` do), one by one, and for as many images of 56 x 56. The
ways take turns; seconds are those of the processor in one thread, and ratios are of medians.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor

import linvit

PATCH = 16


def main(argv: list[str] | None = None) -> None:
    """Prints seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=192, help="channels (%(default)s)")
    parser.add_argument("--images", type=int, default=16, help="images of a batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; ways take turns (%(default)s)")
    parser.add_argument("--attention", default="linear", help="without --small one that can mask keys (%(default)s)")
    parser.add_argument(
        "--small",
        type=int,
        metavar="PATCH",
        help="small images; then of the options above --rounds and --attention count",
    )
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec = json.loads(args.attention) if args.attention.startswith("{") else args.attention
    if args.small:
        compare(*small(args.small, spec), args.rounds)
    else:
        compare(*large(args.dim, args.images, spec), args.rounds)


def large(dim: int, count: int, attention: Any) -> tuple[int, dict[str, Callable[[], Tensor]]]:
    """Returns a number of images of 128 to 448 pixels and the ways of a NaFlexVit to compute them; prints sizes."""
    sizes = torch.randint(8, 29, (count, 2)).tolist()  # patches per side, uniform
    images = [torch.randn(3, PATCH * height, PATCH * width) for height, width in sizes]
    network, batch = model(dim, attention), padded(images)
    projected = model(dim, attention, embed_proj_type="linear")  # which takes patches that are cut already
    state = network.state_dict()
    state["embeds.proj.weight"] = state["embeds.proj.weight"].permute(0, 2, 3, 1).flatten(1)
    projected.load_state_dict(state)
    tokens, longest = [height * width for height, width in sizes], batch["patches"].shape[1]
    print(f"{count} images of {min(tokens)} to {longest} tokens, {sum(tokens)} in all; padded they are")
    print(f"{count * longest}, {count * longest / sum(tokens):.2f} times as many")
    return count, {
        "padded": lambda: projected(batch),
        "packed": lambda: linvit.forward_images(network, images),
        "one by one": lambda: torch.cat([network(image[None]) for image in images]),
    }


def small(patch: int, attention: Any) -> tuple[int, dict[str, Callable[[], Tensor]]]:
    """Returns the number of images of 32 to 80 pixels and the ways of a DeiT to compute them; prints sizes."""
    options = {"embed_dim": 64, "depth": 4, "num_heads": 2, "patch_size": patch, "cpe": True}
    network = linvit.create_backbone("deit_tiny", attention=attention, img_size=56, num_classes=10, **options)
    by_size = copy.deepcopy(network)
    for module in by_size.modules():
        if isinstance(module, linvit.Attention):
            module.declare(packs=False)
    sizes = torch.randint(32, 81, (32, 2)).div(patch).round().long().tolist()  # patches per side
    images, square = (
        [torch.randn(3, patch * height, patch * width) for height, width in sizes],
        torch.randn(32, 3, 56, 56),
    )
    tokens = sum(height * width for height, width in sizes)
    print(f"{len(set(map(tuple, sizes)))} sizes, {tokens} tokens; 56 x 56: {32 * (56 // patch) ** 2}")
    return 32, {
        "packed": lambda: network(images),
        "by size": lambda: by_size(images),
        "one by one": lambda: torch.cat([network(image[None]) for image in images]),
        "56 x 56": lambda: network(square),
    }


def compare(count: int, ways: dict[str, Callable[[], Tensor]], rounds: int) -> None:
    """Prints images per second of each way in training and inference."""
    for training in (True, False):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, way in ways.items():
                start = time.process_time()
                with torch.set_grad_enabled(training):
                    out = way()
                    if training:
                        out.sum().backward()
                seconds[name].append(time.process_time() - start)
        medians = {name: statistics.median(own[1:]) for name, own in seconds.items()}  # the first round warms up
        for name, median in medians.items():
            rate, ratio = count / median, median / medians["packed"]
            print(f"{'training' if training else 'inference'}  {name:<10}  {rate:7.2f} images/s  {ratio:.2f} x packed")


def model(dim: int, attention: Any, embed_proj_type: str = "conv") -> Any:
    """Builds two blocks of a NaFlexVit with another attention."""
    options: dict[str, Any] = {"embed_dim": dim, "depth": 2, "num_heads": dim // 64, "num_classes": 100}
    network = timm.create_model("naflexvit_base_patch16_gap", embed_proj_type=embed_proj_type, **options)
    return linvit.replace_attention(network, attention, 224)


def padded(images: list[Tensor]) -> dict[str, Tensor]:
    """Cuts images into patches and pads these to the longest image, as timm's NaFlex loaders do."""
    cut = [image.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)) for image in images]  # (3, H, P, W, P)
    grids = [(one.shape[1], one.shape[3]) for one in cut]
    longest = max(height * width for height, width in grids)
    patches = torch.zeros(len(images), longest, 3 * PATCH**2)
    places, valid = torch.zeros(len(images), longest, 2, dtype=torch.long), torch.zeros(len(images), longest).bool()
    for i, (one, (height, width)) in enumerate(zip(cut, grids, strict=True)):
        count = height * width
        patches[i, :count] = one.permute(1, 3, 2, 4, 0).reshape(count, -1)
        places[i, :count] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        valid[i, :count] = True
    return {"patches": patches, "patch_coord": places, "patch_valid": valid}


if __name__ == "__main__":
    main()
