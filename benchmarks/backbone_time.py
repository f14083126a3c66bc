"""Forward time of two or more backbones in turns in one process, so that whatever else the machine does meets all.

Each ratio is the median over rounds of a model's time over the first model's in the same round. timm's own models are
named with `timm:` in front. `--profile` adds where the time of each goes, by operator.

Example:
    $ python benchmarks/backbone_time.py flatten_swin_tiny timm:swin_tiny_patch4_window7_224
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import linvit


def build(name: str, size: int) -> nn.Module:
    """A model in evaluation mode, with its initial weights."""
    spec = {"name": "timm", "model": name.removeprefix("timm:")} if name.startswith("timm:") else name
    model: nn.Module = linvit.create_backbone(spec, img_size=size)
    return model.eval()


def seconds(model: nn.Module, images: Tensor) -> float:
    """One forward pass."""
    if images.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rounds(models: Sequence[nn.Module], images: Tensor, count: int) -> list[list[float]]:
    """Seconds of each model, `count` of each; the first two rounds warm up."""
    times = [[seconds(model, images) for model in models] for _ in range(count + 2)]
    return [list(column) for column in zip(*times[2:], strict=True)]


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="names as in `linvit list backbones`, or timm:NAME")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    parser.add_argument("--rounds", type=int, default=10, help="measured runs of each model")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--profile", action="store_true", help="print the operators that take the most time")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)

    images = torch.randn(given.batch, 3, given.size, given.size, device=given.device)
    models = [build(name, given.size).to(given.device) for name in given.models]
    with torch.inference_mode():
        times = rounds(models, images, given.rounds)
    print(
        f"torch {torch.__version__}, {given.device}, {given.threads} thread(s), batch {given.batch}, "
        f"{given.size} pixels, float32, eager; medians of {given.rounds} rounds"
    )
    print("| model | forward, ms | ratio |\n|---|---|---|")
    for name, own in zip(given.models, times, strict=True):
        ratio = statistics.median(a / b for a, b in zip(own, times[0], strict=True))
        print(f"| {name} | {statistics.median(own) * 1e3:.1f} | {ratio:.3f} |")

    if given.profile:
        gpu = torch.device(given.device).type == "cuda"
        for name, model in zip(given.models, models, strict=True):
            with torch.inference_mode(), profile(activities=list(ProfilerActivity) if gpu else None) as profiler:
                model(images)
            order = "self_cuda_time_total" if gpu else "self_cpu_time_total"
            print(f"\n{name}\n{profiler.key_averages().table(sort_by=order, row_limit=15)}")


if __name__ == "__main__":
    main()
