"""Layers, networks and kernels on a GPU: device time, launches, waits of the host, and memory.

`layers` trains an `AttentionLayer` of each mechanism (64 images of 56 x 56 tokens, 96 channels, 3 heads) under bfloat16
autocast, with torch's operators and, where there is one, with the Triton kernel; `networks` trains and runs backbones
at each size, with as many pixels in a batch as 128 images of 224 x 224; `compiled` compiles them for their first size
and goes on to the others; `kernels` runs the Triton kernels alone: "over a copy" is how many bytes of q, k, v, the
output and their gradients they move per second, over those of a copy; `packs` compares packed images with padded ones.
"device" is the time of all kernels of a training step by torch's profiler, without gaps between them; "step" and
"clock" are wall-clock time, which a slow host makes longer.

Example:
    $ PYTHONPATH=src python benchmarks/gpu.py layers softmax linear focused
    $ PYTHONPATH=src python benchmarks/gpu.py networks swin_tiny flatten_swin_tiny --compile
    $ PYTHONPATH=src python benchmarks/gpu.py networks deit_small '{name: pvt_small, attention: linear}' --img_sizes 512
    $ PYTHONPATH=src python benchmarks/gpu.py networks '{name: deit_small, attention: {layout: vitdet, window: 14}}'
    $ PYTHONPATH=src python benchmarks/gpu.py compiled deit_small '{name: deit_small, attention: focused}'
    $ PYTHONPATH=src python benchmarks/gpu.py kernels
    $ PYTHONPATH=src python benchmarks/gpu.py packs linear focused
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
import yaml
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import linvit
from linvit.attention.kernels import Formula, linear_attention
from linvit.attention.kernels.choice import has_kernel
from linvit.tasks.execution import keep_attention_features

SHAPE = 64, 56, 96, 3  # images, side of the grid, channels, heads
NETWORKS = ("deit_tiny", "flatten_deit_tiny", "pvt_small", "flatten_pvt_small", "swin_tiny", "flatten_swin_tiny")
NETWORKS += ("mlla_tiny", "deit_small", "pvt_v2_b2", "cswin_tiny")
KERNELS = ((64, 56, 3, 32), (4, 224, 3, 32), (4096, 7, 3, 32), (256, 14, 3, 64), (64, 14, 12, 64), (16, 28, 3, 128))
"""Images, side of the grid, heads, channels of one."""
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


class Training:
    """A backbone with its images: a training step by AdamW and inference, under bfloat16 autocast."""

    def __init__(self, spec: str, batch: int, size: int) -> None:
        self.network = linvit.create_backbone(yaml.safe_load(spec), num_classes=1000, img_size=size).cuda()
        keep_attention_features(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), fused=True)
        self.call: Callable[[torch.Tensor], torch.Tensor] = self.network
        self.feed(batch, size)

    def feed(self, batch: int, size: int) -> None:
        """Takes as many pixels as a batch of images of 224 x 224 has, or one image."""
        self.batch = max(1, round(batch * (224 / size) ** 2))
        self.images = torch.randn(self.batch, 3, size, size, device="cuda")
        self.classes = torch.randint(1000, (self.batch,), device="cuda")

    def step(self) -> None:
        """A training step."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(self.call(self.images), self.classes)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def infer(self) -> None:
        """A prediction."""
        with torch.autocast("cuda", torch.bfloat16):
            self.call(self.images)


def network(spec: str, batch: int, size: int, compiled: bool) -> None:
    """Prints a row for a backbone, and one with kernels: images per second in training and inference, and memory."""
    training = Training(spec, batch, size)
    if compiled:
        torch.compiler.reset()
        training.call = torch.compile(training.network, dynamic=False)
    for label in with_kernels(training.network, spec):
        row = []
        for mode, work in (("train", training.step), ("eval", training.infer)):
            training.network.train(mode == "train")
            try:
                for _ in range(2):
                    work()
                device, launches = on_the_device(work)
                speeds = [f"{training.batch / time:,.1f}" for time in (device, seconds(work))]
                row += [*speeds, f"{peak(work) / 2**30:.1f}", str(launches)]
            except torch.OutOfMemoryError:
                row += ["out of memory", *[""] * 3]
        print(f"| {label} | {size} | {training.batch} | {' | '.join(row)} |", flush=True)


def compiled_network(spec: str, batch: int, sizes: Sequence[int]) -> None:
    """Prints a row for each size in turn: graphs and breaks until then, the first step, and eager over compiled."""
    torch.compiler.reset()
    counters.clear()
    training = Training(spec, batch, sizes[0])
    fast = torch.compile(training.network)
    for size in sizes:
        training.feed(batch, size)
        times = []
        for call in (training.network, fast):
            training.call = call
            start = time.perf_counter()
            training.step()
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            training.step()
            times.append((on_the_device(training.step)[0], seconds(training.step)))
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        eager, compiled = times
        gains = [f"{a / b:.2f}" for a, b in zip(eager, compiled, strict=True)]
        print(f"| `{spec}` | {size} | {graphs} | {breaks} | {first:.0f} | {' | '.join(gains)} |", flush=True)


def kernel(phi: str, images: int, side: int, heads: int, channels: int) -> None:
    """Prints a row for the kernel of a feature map: device time of its passes, and their speed over that of a copy."""
    formula = Formula(phi, eps=1e-6, power=3.0)
    shape = images, side * side, heads, channels
    q, k, v, gradient = (torch.randn(shape, device="cuda").bfloat16().transpose(1, 2) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = linear_attention(*leaves, formula)
    passes = (
        (lambda: linear_attention(*leaves, formula), 4),
        (lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True), 7),
    )
    row = []
    for work, tensors in passes:
        for _ in range(2):
            work()
        took = statistics.median(on_the_device(work)[0] for _ in range(REPEATS))
        row += [f"{took * 1e3:.3f}", f"{tensors * q.nbytes / copy_speed() / took:.0%}"]
    print(f"| {phi} | {images}, {side**2:,}, {heads}, {channels} | {' | '.join(row)} |", flush=True)


@cache
def copy_speed() -> float:
    """Bytes per second that a copy of 1 GiB reads and writes."""
    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(on_the_device(lambda: target.copy_(source))[0] for _ in range(REPEATS))


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
    parser.add_argument("what", choices=("layers", "networks", "compiled", "kernels", "packs"))
    parser.add_argument("names", nargs="*", help="mechanisms or feature maps; backbones, also as {name: ..., ...}")
    parser.add_argument("--batch", type=int, default=128, help="images of a network at 224 x 224 (%(default)s)")
    parser.add_argument("--img_sizes", type=int, nargs="+", help="their sides (224; compiled: 224 288 384)")
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
    elif given.what == "kernels":
        print(f"a copy reads and writes {copy_speed() / 1e12:.2f} TB/s\n")
        print("| phi | images, tokens, heads, channels | forward ms | over a copy | backward ms | over a copy |")
        print("|---|---|---|---|---|---|")
        for phi, shape in product(given.names or ("elu", "focused"), KERNELS):
            kernel(phi, *shape)
    elif given.what == "compiled":
        print("| network | size | graphs | breaks | first step s | eager over compiled, device | clock |")
        print("|---|---|---|---|---|---|---|")
        for name in given.names or NETWORKS:
            compiled_network(name, given.batch, given.img_sizes or (224, 288, 384))
    else:
        columns = "images/s, device | clock | GiB | launches"
        print(f"| network | size | images | training: {columns} | inference: {columns} |\n{'|---' * 11}|")
        for size, name in product(given.img_sizes or (224,), given.names or NETWORKS):
            network(name, given.batch, size, given.compile)


if __name__ == "__main__":
    main()
