"""The ceiling of a network, and the quickest way to execute its softmax attention."""

from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from linvit.advice.bench import MOST_TURNS, TURNS, Bench, Context, Way
from linvit.advice.ceiling import InterceptedAttention
from linvit.advice.subject import without_cores
from linvit.advice.verdict import SIEVE, UNCHANGED, Measured, Row, room_of
from linvit.experiments.measure import Turns

SLOW = 1.5  # times as slow as the quickest way: then a way to execute softmax is measured once, and at no larger size


def measure_ceiling(bench: Bench, size: Measured, intercepted: bool, until: float) -> None:
    """Measures a network as it is and without cores, until its room is known or so many seconds are left."""
    turns = Turns[str](bench.settings.device, bench.clock)
    # the mode takes time for each operator, so it is on for both
    unchanged: Context = partial(InterceptedAttention, replace=False) if intercepted else nullcontext
    around: Context = InterceptedAttention if intercepted else nullcontext
    network = bench.network(size.img_size)
    now = Row(UNCHANGED, "now")
    without = Row("no attention (the ceiling)", "ceiling")
    bare = without_cores(bench.subject, network, size.img_size)
    for row, one, context in ((now, network, unchanged), (without, bare, around)):
        if not bench.add(turns, row, one, size.img_size, Way(), context):
            size.notes.append(f"{size.size}: {row.name}: {row.note}")
            return
    size.ceiling = {"now": now, "ceiling": without}
    while len(now.seconds) < TURNS or (
        room_of(size) == "unclear" and bench.left > until and len(now.seconds) < MOST_TURNS
    ):
        bench.round(turns, (now, without), f"{size.size}: {size.room.median:.2f}x")


def find_ways(bench: Bench, size: Measured, compiled: bool) -> list[Way]:
    """Returns the ways to execute softmax on this device, other than as it is."""
    cuda = torch.device(bench.settings.device).type == "cuda"
    calls = InterceptedAttention(replace=False)
    with torch.no_grad(), calls:
        image = torch.zeros(1, bench.subject.in_chans, *size.img_size)
        bench.network(size.img_size).eval()(image.to(bench.settings.device, bench.settings.weights))
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    backends = [*(fused if cuda else ()), SDPBackend.MATH] if calls.calls else []
    low = cuda and bench.settings.dtype == torch.float32 and torch.cuda.is_bf16_supported()
    found = []
    for dtype in (None, torch.bfloat16) if low else (None,):
        found += [Way(None, False, dtype)] if dtype else []
        found += [Way(backend, False, dtype) for backend in backends]
        found += [Way(None, True, dtype)] if compiled else []
    return found


def best_way(bench: Bench, size: Measured, compiled: bool) -> tuple[Way, list[Row]]:
    """Returns the quickest way to execute softmax in two turns, and rows of the others, which keep these turns.

    A way that is `SLOW` in its first call is not called again, and not measured at larger sizes.
    """
    turns, rows = Turns[str](bench.settings.device, bench.clock), list[Row]()
    ways = {UNCHANGED: Way(), **{way.label: way for way in find_ways(bench, size, compiled)}}
    if len(ways) == 1:
        return Way(), []
    for name, way in ways.items():
        row = Row(name, "softmax", note=bench.slow.get(name, ""))
        network = bench.network(size.img_size, way.dtype)
        if not row.note and bench.add(turns, row, network, size.img_size, way, nullcontext):
            rows.append(row)
        else:
            size.notes.append(f"{size.size}: {row.name}: {row.note}")
    quickest = min(bench.calls[row.name] for row in rows)
    slow = [row for row in rows if bench.calls[row.name] > SLOW * quickest and row.name != UNCHANGED]
    for row in slow:
        row.seconds.append(bench.calls[row.name])
        times = bench.calls[row.name] / quickest
        bench.slow[row.name] = f"left out, since at {size.size} it took {times:.1f} times as long as the quickest"
    going = [row for row in rows if row not in slow]
    for _ in range(SIEVE):
        bench.round(turns, going, f"{size.size}: SDPA backends, compiler, precision")
    best = min(going, key=lambda row: row.median)
    return ways[best.name], rows
