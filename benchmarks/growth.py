"""Time of each mechanism that claims O(N) at four times the tokens: N = 12,544 against 3,136, forward, in turns.

Processor time of one thread, so that waiting for other programs does not count; medians. Memory is kept as `linvit fit`
keeps it. Without that (`--fresh`) the C library gives large blocks back to the system after some calls and gets them
again page by page, which is a matter of its thresholds, not of the mechanism.

Example:
    $ python benchmarks/growth.py
"""

import statistics
import sys
import time

import torch

import linvit
from linvit.cli.training.memory import keep_memory

GRIDS = {3136: linvit.Grid((56, 56)), 12544: linvit.Grid((112, 112))}
DIM, HEADS, ROUNDS = 64, 2, 25


def main() -> None:
    """Prints a Markdown table."""
    if "--fresh" not in sys.argv:
        keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| attention | N = 3,136, ms | N = 12,544, ms | ratio |\n|---|---|---|---|", flush=True)
    for name in linvit.list_attentions():
        mechanisms = {
            n: linvit.create_attention(name, dim=DIM, num_heads=HEADS, grid=grid).eval() for n, grid in GRIDS.items()
        }
        if next(iter(mechanisms.values())).complexity != "O(N)":
            continue
        times: dict[int, list[float]] = {n: [] for n in GRIDS}
        for _ in range(ROUNDS):
            for n, mechanism in mechanisms.items():
                times[n].append(seconds(mechanism, n))
        small, large = (statistics.median(times[n]) * 1e3 for n in GRIDS)
        print(f"| {name} | {small:.2f} | {large:.2f} | {large / small:.2f} |", flush=True)


@torch.no_grad()
def seconds(mechanism: linvit.Attention, tokens: int) -> float:
    """The mean of three forward passes on one image."""
    q, k, v = torch.randn(3, 1, HEADS, tokens, DIM // HEADS)
    extra = {"x": torch.randn(1, tokens, DIM)} if mechanism.takes_input else {}
    k = q if mechanism.projections == "qv" else k
    start = time.thread_time()
    for _ in range(3):
        mechanism(q, k, v, GRIDS[tokens], **extra)
    return (time.thread_time() - start) / 3


if __name__ == "__main__":
    main()
