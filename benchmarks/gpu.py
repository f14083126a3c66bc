"""Layers and networks on a GPU: what its kernels take, how many there are, what the host waits for, and memory.

`layers` trains an `AttentionLayer` of each mechanism (64 images of 56 x 56 tokens, 96 channels, 3 heads) under bfloat16
autocast, with torch's operators and, where there is one, with the Triton kernel; `networks` trains and runs backbones
at 224 x 224; `packs` compares the Triton kernel on packed images with that on padded ones. "device" is the time of all
kernels of a training step by torch's profiler, without gaps between them; "step" is that of the clock, which a slow
host makes longer.

Example:
    $ PYTHONPATH=src python benchmarks/gpu.py layers softmax linear focused
    $ PYTHONPATH=src python benchmarks/gpu.py networks swin_tiny flatten_swin_tiny --compile
    $ PYTHONPATH=src python benchmarks/gpu.py packs linear focused
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import linvit
from linvit.attention.kernels import linear_attention
from linvit.attention.kernels.choice import has_kernel
from linvit.tasks.execution import keep_attention_features

SHAPE = 64, 56, 96, 3  # images, side of the grid, channels, heads
NETWORKS = ("deit_tiny", "flatten_deit_tiny", "pvt_small", "flatten_pvt_small", "swin_tiny", "flatten_swin_tiny")
NETWORKS += ("mlla_tiny", "deit_small", "pvt_v2_b2", "cswin_tiny")
REPEATS = 8


def seconds(work: Callable[[], Any]) -> float:
    """The median of the clock."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def on_the_device(step: Callable[[], Any]) -> tuple[float, int]:
    """The seconds of all kernels, and their number."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / 1e6, len(kernels)


def peak(step: Callable[[], Any]) -> int:
    """The most bytes at one time."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def with_kernels(module: nn.Module, name: str) -> Iterator[str]:
    """What can compute its attention, one after the other: what a table calls the module then."""
    for kernel in ("torch", "triton") if any(map(has_kernel, module.modules())) else ("torch",):
        for one in module.modules():
            if hasattr(one, "attention_kernel"):
                one.attention_kernel = kernel
        yield f"`{name}`{', kernel' * (kernel == 'triton')}"


def layer(name: str) -> None:
    """Prints a row for a mechanism, and one with its kernel."""
    batch, side, dim, heads = SHAPE
    grid = linvit.Grid((side, side))
    layer = linvit.AttentionLayer(dim, heads, grid, attention=name).cuda().train()
    keep_attention_features(layer)
    x = torch.randn(batch, side * side, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x, grid)
        out.backward(gradient.to(out.dtype))
        for leaf in (x, *layer.parameters()):
            leaf.grad = None

    for label in with_kernels(layer, name):
        for _ in range(2):
            step()
        before = torch.cuda.memory_allocated()
        device, launches = on_the_device(step)
        row = f"{device * 1e3:.2f} | {launches} | {seconds(step) * 1e3:.1f} | {(peak(step) - before) / 2**20:,.0f}"
        print(f"| {label} | {row} |", flush=True)


def network(name: str, batch: int, size: int, compiled: bool) -> None:
    """Prints a row for a backbone, and one with kernels: images per second in training and inference, and memory."""
    network = linvit.create_backbone(name, num_classes=1000, img_size=size).cuda()
    keep_attention_features(network)
    images, classes = torch.randn(batch, 3, size, size, device="cuda"), torch.randint(1000, (batch,), device="cuda")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    call = torch.compile(network) if compiled else network

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(call(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def infer() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            call(images)

    for label in with_kernels(network, name):
        network.train()
        for _ in range(2):
            step()
        device, launches = on_the_device(step)
        row = f"{batch / device:,.0f} | {batch / seconds(step):,.0f} | {peak(step) / 2**30:.1f} | {launches}"
        network.eval()
        infer()
        print(f"| {label} | {row} | {batch / seconds(infer):,.0f} |", flush=True)


def pack_speed(name: str) -> float:
    """Tokens per second of a mechanism's kernel, forward and backward, on packed images over those on padded ones."""
    images, side, dim, heads = SHAPE
    sizes = torch.randint(8, side + 1, (images - 1, 2), generator=torch.Generator().manual_seed(0))
    packed, grid = linvit.Packed([*sizes.tolist(), (side, side)]), linvit.Grid((side, side))
    mechanism = linvit.create_attention(name, dim=dim, num_heads=heads, grid=grid).cuda()
    speeds = []
    for batch, place in ((images, grid), (1, packed)):
        shape = batch, place.num_queries, heads, dim // heads
        q, k, v, gradient = (torch.randn(shape, device="cuda").bfloat16().transpose(1, 2) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.no_grad():
            formula = mechanism.formula(q, k, place)

        def step(place: Any = place, formula: Any = formula, leaves: Any = leaves, gradient: Any = gradient) -> None:
            out = linear_attention(*leaves, formula, place if isinstance(place, linvit.Packed) else None)
            torch.autograd.grad(out, leaves, gradient)

        for _ in range(2):
            step()
        seconds = statistics.median(on_the_device(step)[0] for _ in range(REPEATS))
        speeds.append(batch * place.num_queries / seconds)
    padded, alone = speeds
    return alone / padded


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layers", "networks", "packs"))
    parser.add_argument("names", nargs="*", help="mechanisms or backbones")
    parser.add_argument("--batch", type=int, default=128, help="images of a network (%(default)s)")
    parser.add_argument("--img_size", type=int, default=224, help="their side (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="networks by torch.compile")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    if given.what == "layers":
        print("| layer | device ms | launches | step ms | peak MiB |\n|---|---|---|---|---|")
        for name in given.names or linvit.list_attentions():
            layer(name)
    elif given.what == "packs":
        print("| kernel of | tokens per second, packed over padded |\n|---|---|")
        for name in given.names or ("linear", "efficient", "focused", "slab", "mala", "mlla", "rala"):
            print(f"| `{name}` | {pack_speed(name):.2f} |", flush=True)
    else:
        print("| network | images/s, device | images/s, clock | GiB | launches | inference, images/s |")
        print("|---|---|---|---|---|---|")
        for name in given.names or NETWORKS:
            network(name, given.batch, given.img_size, given.compile)


if __name__ == "__main__":
    main()
