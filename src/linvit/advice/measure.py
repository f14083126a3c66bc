"""Measures rows of one size in turns: ceilings, rivals, mechanisms."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from linvit.advice.ceiling import InterceptedAttention
from linvit.advice.count import Counted, count
from linvit.advice.rivals import windowed
from linvit.advice.subject import Subject, cores_of, find_subject, without_cores
from linvit.advice.verdict import JUDGED, SIEVE, UNCHANGED, Measured, Row, room_of, state_of
from linvit.analysis.operations import make_inputs, num_parameters
from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.bench.runner import Runner, Settings
from linvit.experiments.measure import Turns, out_of_memory, peak_memory
from linvit.registry import Spec, attentions

TURNS = 6  # that a 95 % interval by ranks needs
MOST_TURNS = 60
MECHANISMS = 6
Context = Callable[[], AbstractContextManager[Any]]


class Way(NamedTuple):
    """Execution of softmax: SDPA backend, compiler and precision."""

    backend: SDPBackend | None = None
    compiled: bool = False
    dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        """Name of a row, with the differences from the unchanged network."""
        backend = self.backend.name.lower().replace("_attention", "") if self.backend else ""
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype else ""
        return ", ".join(filter(None, ["softmax", backend, "compiled" * self.compiled, dtype]))


class TimeIsUpError(Exception):
    """The time limit is reached; what is measured until then is kept."""


class Bench:
    """Builds networks of a subject and takes samples of them.

    Args:
        subject: The network.
        settings: Device, precision, batch; `backward` measures training steps.
        limit: Seconds after which no turn begins.
        clock: Seconds for samples.
        now: Seconds for the limit.
        say: Is told what is going on.
    """

    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        *,
        limit: float,
        clock: Callable[[], float],
        now: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.subject, self.settings, self.clock, self.now, self.say = subject, settings, clock, now, say
        self.end = now() + limit
        self._built: dict[tuple[tuple[int, int], torch.dtype], nn.Module] = {}

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.end - self.now()

    def count(self, size: tuple[int, int]) -> Counted:
        """Counts a size; a `UserError` says if the network cannot take it, or if it has no core that can be taken out.

        A core is found in attention that linvit can replace, and in calls of `F.scaled_dot_product_attention`.
        """
        subject = self.subject
        try:
            found = count(without_cores(subject, subject.build(size), size), size, subject.in_chans)
        except UserError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"{subject.name} cannot take images of {size[0]} x {size[1]}: {reason}") from error
        if not found.layers:
            raise UserError(
                f"{subject.name} cannot be timed without attention: linvit cannot replace it, and it makes no call of "
                f"F.scaled_dot_product_attention (0 calls)"
            )
        return found

    def network(self, size: tuple[int, int], dtype: torch.dtype | None = None) -> nn.Module:
        """The network as it is, on the device; networks of one size and precision share its weights."""
        key = size, dtype or self.settings.weights
        if key not in self._built:
            self._built = {known: one for known, one in self._built.items() if known[0] == size}
            self._built[key] = self.subject.build(size).to(self.settings.device, key[1])
        return self._built[key]

    def add(self, turns: Turns[str], row: Row, network: nn.Module, size: Any, way: Way, around: Context) -> bool:
        """Adds a row to the turns; False, with a note, if the network fails or memory does not suffice."""
        if self.left < 0:
            raise TimeIsUpError
        self.say(f"{size[0]} x {size[1]}: {row.name}")
        settings = self.settings._replace(dtype=way.dtype or self.settings.dtype)
        backends = () if way.backend is None else (partial(sdpa_kernel, way.backend),)
        try:
            images = torch.randn(settings.batch, self.subject.in_chans, *size).to(settings.device, settings.weights)
            mode = "compiled" if way.compiled else "eager"
            runner = Runner(network, (images,), {}, settings, mode, backends[0] if backends else around)
            work = getattr(runner, settings.passes[-1])
            start = self.now()
            if way.compiled:
                work()
                row.compile_seconds = self.now() - start
            turns.add(row.name, work)
            if torch.device(settings.device).type == "cuda":
                row.peak = peak_memory(work, settings.device)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            row.note = "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {first}"
            turns.times.pop(row.name, None)
            return False
        row.seconds = turns.times[row.name]
        return True

    def round(self, turns: Turns[str], rows: Sequence[Row], what: str) -> None:
        """Takes a sample of each row, unless the time limit is reached."""
        if self.left < 0:
            raise TimeIsUpError
        self.say(f"{what}, turn {len(rows[0].seconds) + 1} of {len(rows)} rows")
        for _ in turns.round([row.name for row in rows]):
            pass

    def measure_ceiling(self, size: Measured, intercepted: bool, until: float) -> None:
        """Measures a network as it is and without cores, until its room is known or so many seconds are left."""
        turns = Turns[str](self.settings.device, self.clock)
        around: Context = InterceptedAttention if intercepted else nullcontext
        network = self.network(size.img_size)
        now = Row(UNCHANGED, "now")
        without = Row("no attention (the ceiling)", "ceiling", 0)
        bare = without_cores(self.subject, network, size.img_size)
        for row, one, context in ((now, network, nullcontext), (without, bare, around)):
            if not self.add(turns, row, one, size.img_size, Way(), context):
                size.notes.append(f"{row.name}: {row.note}")
                return
        size.ceiling = {"now": now, "ceiling": without}
        while len(now.seconds) < TURNS or (
            room_of(size) == "unclear" and self.left > until and len(now.seconds) < MOST_TURNS
        ):
            self.round(turns, (now, without), f"{size.size}: {size.room.median:.2f}x")

    def ways(self, size: Measured, compiled: bool) -> list[Way]:
        """Ways to execute softmax on this device, but as it is."""
        cuda = torch.device(self.settings.device).type == "cuda"
        calls = InterceptedAttention(replace=False)
        with torch.no_grad(), calls:
            network = copy.deepcopy(self.network(size.img_size)).to("meta").eval()
            network(torch.empty(1, self.subject.in_chans, *size.img_size, device="meta"))
        fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        backends = [*(fused if cuda else ()), SDPBackend.MATH] if calls.calls else []
        low = cuda and self.settings.dtype == torch.float32 and torch.cuda.is_bf16_supported()
        found = []
        for dtype in (None, torch.bfloat16) if low else (None,):
            found += [Way(None, False, dtype)] if dtype else []
            found += [Way(backend, False, dtype) for backend in backends]
            found += [Way(None, True, dtype)] if compiled else []
        return found

    def best_way(self, size: Measured, compiled: bool) -> tuple[Way, list[Row]]:
        """The quickest way to execute softmax in two turns, and rows of the others, which keep these turns."""
        turns, rows = Turns[str](self.settings.device, self.clock), []
        ways = {UNCHANGED: Way(), **{way.label: way for way in self.ways(size, compiled)}}
        if len(ways) == 1:
            return Way(), []
        for name, way in ways.items():
            row = Row(name, "softmax")
            if self.add(turns, row, self.network(size.img_size, way.dtype), size.img_size, way, nullcontext):
                rows.append(row)
            else:
                size.notes.append(f"{row.name}: {row.note}")
        for _ in range(SIEVE):
            self.round(turns, rows, f"{size.size}: SDPA backends, compiler, precision")
        best = min(rows, key=lambda row: row.median)
        return ways[best.name], rows

    def quickest(self, specs: Iterable[Spec], size: Measured) -> list[Spec]:
        """Orders mechanisms by the time of one call alone, at the layer with most work, in two turns.

        Mechanisms that cannot be built there are left out.
        """
        cores = cores_of(without_cores(self.subject, self.network(size.img_size), size.img_size))
        if not cores:
            return []
        core = max(cores, key=lambda one: one.grid.num_queries * one.dim * (1 + one.grid.num_keys))
        turns, built = Turns[int](self.settings.device, self.clock), {}
        settings = self.settings._replace(optimizer=False)

        def make(*shape: int) -> torch.Tensor:
            made = torch.randn(settings.batch, *shape).to(settings.device, settings.weights)
            return made.requires_grad_(settings.backward)

        for i, spec in enumerate(specs):
            self.say(f"first round: {spec_label(spec)}")
            try:
                mechanism = self.mechanism(spec, core, core.grid)
                if mechanism.facts.complexity == "O(N^2)":
                    continue
                inputs, extra = make_inputs(mechanism, core.grid, make)
                turns.add(i, getattr(Runner(mechanism, inputs, extra, settings), settings.passes[-1]))
                built[i] = spec
            except Exception as error:
                size.notes.append(f"{spec_label(spec)}: {str(error).partition(chr(10))[0]}")
        for _ in range(SIEVE):
            for _ in turns.round([*built]):
                pass
        return [built[i] for i in sorted(built, key=lambda i: sum(turns.times[i]))]

    def mechanism(self, spec: Spec, core: Attention, grid: Grid) -> Attention:
        """A mechanism for the layer of a core."""
        narrow = {} if core.key_dim == core.head_dim else {"key_dim": core.key_dim}
        made: Attention = attentions.create(spec, dim=core.dim, num_heads=core.num_heads, grid=grid, **narrow)
        return made

    def usual(self, size: Measured) -> list[Spec]:
        """Mechanisms that project q, k and v, without stem and without parameters per token."""
        cores = cores_of(without_cores(self.subject, self.network(size.img_size), size.img_size))
        found: list[Spec] = []
        for name in attentions.names() if cores else ():
            try:
                with torch.device("meta"):
                    one = self.mechanism(name, cores[0], Grid((8, 8)))
                    other = self.mechanism(name, cores[0], Grid((12, 12)))
            except Exception:  # it needs options, or another width
                continue
            per_token = num_parameters(one) != num_parameters(other)
            if one.host.project == "qkv" and one.host.stem == "none" and not per_token:
                found.append(name)
        return found

    def compare(
        self,
        size: Measured,
        specs: Sequence[Spec],
        way: Way,
        ways: Sequence[Row],
        intercepted: bool,
        seconds: float,
        small: str | None,
    ) -> None:
        """Measures rivals and mechanisms of one size in at most about so many seconds."""
        turns = Turns[str](self.settings.device, self.clock)
        around: Context = InterceptedAttention if intercepted else nullcontext
        img_size, network = size.img_size, self.network(size.img_size, way.dtype)
        start = self.now()

        def add(row: Row, one: nn.Module, at: Any = img_size, how: Way = way, context: Context = nullcontext) -> None:
            if self.add(turns, row, one, at, how, context):
                size.rows.append(row)
            else:
                size.notes.append(f"{row.name}: {row.note}")

        def replaced(row: Row, specs: Sequence[Any]) -> None:
            row.attention = list(specs)
            try:
                made = self.subject.with_attention(network, specs, img_size)
            except UserError as error:
                size.notes.append(f"{row.name}: {error}")
            else:
                add(row, made)

        bare = without_cores(self.subject, network, img_size)
        blocks = len(cores_of(bare))
        total = blocks or None
        add(Row(UNCHANGED, "now", total), self.network(img_size), how=Way())
        if way != Way():
            add(Row(way.label, "softmax", total), network)
        add(Row("no attention (the ceiling)", "ceiling", 0), bare, how=way._replace(backend=None), context=around)
        if not any(row.name.startswith("softmax, math") for row in ways) and blocks:  # no call of SDPA
            replaced(Row("softmax, fused", "softmax", blocks), ["softmax"] * blocks)
        if blocks:
            grids = {core.grid for core in cores_of(bare)}
            plain = len(grids) == 1 and all(grid.kv_size is None for grid in grids)
            if plain and max(next(iter(grids)).size) > 14 and blocks > 4:
                replaced(Row("softmax in windows, 4 global blocks", "windows", blocks), windowed(blocks))
        less = tuple(max(1, round(0.75 * side / self.subject.multiple)) * self.subject.multiple for side in img_size)
        if less != img_size:
            fewer = Row(f"softmax at {less[0]} x {less[1]}", "loses quality", total)
            self.other(size, turns, fewer, lambda: self.subject.build((less[0], less[1])), less, way)
        if small:
            row = Row(f"softmax, {small}", "loses quality")
            self.other(size, turns, row, lambda: find_subject(small).build(img_size), img_size, way)
        call = max(size.ceiling["now"].median, 1e-9) if size.ceiling else 1e-3
        room = seconds - (self.now() - start) - (len(size.rows) + JUDGED) * (SIEVE + TURNS) * call
        rows = max(1, math.floor(room / ((SIEVE + 2) * call)))
        for spec in specs[: max(1, rows // 3)] if rows > 1 or not size.rows else specs[:1]:
            for row_name, kept in placements(spec_label(spec), blocks):
                row = Row(row_name, "mechanism", kept, sieved=True)
                replaced(row, [spec] * (blocks - kept) + [None] * kept)
        for _ in range(SIEVE):
            self.round(turns, size.rows, size.size)
        mechanisms = sorted((row for row in size.rows if row.kind == "mechanism"), key=lambda row: row.median)
        others = [row for row in size.rows if row.kind != "mechanism"]
        per_turn = sum(row.median for row in size.rows)
        everything = TURNS * per_turn < seconds - (self.now() - start)
        going = [*others, *(mechanisms if everything else mechanisms[:JUDGED])]
        for turn in range(MOST_TURNS):
            spent = self.now() - start
            if turn >= TURNS and (spent > seconds or self.left < 0 or state_of(size) in ("pays", "loses")):
                break
            self.round(turns, going, size.size)

    def other(
        self, size: Measured, turns: Turns[str], row: Row, build: Callable[[], nn.Module], at: Any, way: Way
    ) -> None:
        """Adds a row of another network, or of the same at another size."""
        try:
            network = build().to(self.settings.device, way.dtype or self.settings.weights)
        except Exception as error:
            size.notes.append(f"{row.name}: {str(error).partition(chr(10))[0]}")
            return
        if self.add(turns, row, network, at, way, nullcontext):
            size.rows.append(row)
        else:
            size.notes.append(f"{row.name}: {row.note}")


def placements(name: str, blocks: int) -> list[tuple[str, int]]:
    """Names and numbers of softmax blocks: none, the last two, the last half."""
    found = [(f"{name} in all {blocks} blocks", 0)]
    for kept in dict.fromkeys([2, blocks - blocks // 2]):
        if 0 < kept < blocks:
            found.append((f"{name}, last {kept} of {blocks} softmax", kept))
    return found
