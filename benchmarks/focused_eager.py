"""Time of focused attention against the plain sequence of the paper's steps, eager mode, forward, float32, CPU.

Both start from the output (B, N, 3 C) of the fused input projection and end before the output projection, have the same
parameters, and run in turns in one process; the ratio is that of the medians. Run: `python benchmarks/focused_eager.py`
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid, create_attention
from linvit.attention.focused import FocusedAttention

SHAPES = [(4, 3136, 96, 3), (16, 784, 192, 6), (32, 196, 192, 3)]  # batch, tokens, channels, heads


def plain(module: FocusedAttention, qkv: Tensor, size: tuple[int, int]) -> Tensor:
    """The steps one after the other, on tokens with all channels, (B, N, 3 C) -> (B, N, C)."""
    assert module.positional_encoding is not None
    assert module.scale is not None
    assert module.dwc is not None
    q, k, v = qkv.chunk(3, dim=-1)
    batch, tokens, channels = q.shape
    heads = module.num_heads
    k = k + module.positional_encoding
    q, k = F.relu(q) + module.relu_eps, F.relu(k) + module.relu_eps
    scale = F.softplus(module.scale)
    q, k = q / scale, k / scale
    q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
    q, k = q**module.focusing_factor, k**module.focusing_factor
    q = q / q.norm(dim=-1, keepdim=True) * q_norm
    k = k / k.norm(dim=-1, keepdim=True) * k_norm
    q, k, v = (x.reshape(batch, tokens, heads, -1).permute(0, 2, 1, 3) for x in (q, k, v))  # (B, h, N, d)
    z = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + module.eps)
    kv = (k.transpose(-2, -1) * tokens**-0.5) @ (v * tokens**-0.5)
    out: Tensor = (q @ kv * z).transpose(1, 2).reshape(batch, tokens, channels)
    plane = v.reshape(batch * heads, *size, -1).permute(0, 3, 1, 2)  # (B h, d, H, W)
    local: Tensor = module.dwc(plane)
    return out + local.reshape(batch, channels, tokens).permute(0, 2, 1)


def ours(module: FocusedAttention, qkv: Tensor, size: tuple[int, int]) -> Tensor:
    """The mechanism as `AttentionLayer` calls it."""
    q, k, v = (x.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, dim=-1))
    out: Tensor = module(q, k, v, Grid(size))
    return out.transpose(1, 2).flatten(2)


def paired_medians(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each, run in turns so that whatever else the machine does meets all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 3):
        for run, kept in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if turn >= 3:  # warm
                kept.append(time.perf_counter() - start)
    return [statistics.median(kept) for kept in times]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="measured runs of each")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--grad", action="store_true", help="record for a backward pass")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {given.threads} thread(s), medians of {given.rounds} runs, grad {given.grad}")
    print(f"{'batch':>5} {'N':>5} {'C':>4} {'heads':>5} {'plain ms':>9} {'ours ms':>9} {'ratio':>6} {'max diff':>9}")
    for batch, tokens, channels, heads in SHAPES:
        size = (math.isqrt(tokens),) * 2
        module = create_attention("focused", dim=channels, num_heads=heads, grid=Grid(size))
        qkv = torch.randn(batch, tokens, 3 * channels)
        with torch.set_grad_enabled(given.grad):
            difference = (plain(module, qkv, size) - ours(module, qkv, size)).abs().max().item()
            runs = [functools.partial(function, module, qkv, size) for function in (plain, ours)]
            slow, fast = paired_medians(runs, given.rounds)
        print(
            f"{batch:>5} {tokens:>5} {channels:>4} {heads:>5} {slow * 1e3:>9.2f} {fast * 1e3:>9.2f} "
            f"{fast / slow:>6.2f} {difference:>9.1e}"
        )


if __name__ == "__main__":
    main()
