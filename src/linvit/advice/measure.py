"""Measures rows of one size in turns: ceilings, rivals, mechanisms."""

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
from linvit.advice.subject import Subject, cores_of, find_subject, without_cores
from linvit.advice.verdict import JUDGED, SIEVE, UNCHANGED, Measured, Row, room_of, state_of
from linvit.analysis.operations import make_inputs, num_parameters
from linvit.attention.base import Attention, Grid
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.replace_attention import softmax_blocks
from linvit.errors import UserError, quote_first
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.bench.runner import Runner, Settings
from linvit.experiments.measure import Turns, out_of_memory, peak_memory
from linvit.registry import Spec, attentions
from linvit.registry.layouts import LAYOUTS, expand_layout, is_layout, window_side

TURNS = 6  # needed for a 95 % interval by ranks
MOST_TURNS = 60
WINDOW = 14  # largest side of windows, in patches
MECHANISMS = 6
SLOW = 1.5  # times as slow as the quickest way: then a way to execute softmax is measured once, and at no larger size
FIRST_ROUND = 0.1  # of the time left, at most, to order mechanisms
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
    """Raised when the time limit is reached; the measurements so far are kept."""


class Bench:
    """Builds networks of a subject and takes samples of them.

    Args:
        subject: The network.
        settings: Device, precision, batch; `backward` measures training steps.
        limit: Seconds after which no turn begins.
        clock: Seconds for samples.
        now: Seconds for the limit.
        say: Called with texts on the progress.
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
        self.limit, self.end = limit, now() + limit
        self.pace = 1.0  # seconds of the limit that pass per second of the clock
        self.slow = dict[str, str]()  # ways to execute softmax that are not measured again, with the reason
        self._calls = dict[str, float]()  # seconds of a call by row
        self._built: dict[tuple[tuple[int, int], torch.dtype], nn.Module] = {}

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.end - self.now()

    def count(self, size: tuple[int, int]) -> Counted:
        """Counts a size; raises a `UserError` if the network does not accept it, or has no core that can be removed.

        A core is found in attention that linvit can replace, and in calls of `F.scaled_dot_product_attention`.
        """
        subject = self.subject
        for device in ("meta", "cpu"):  # the operators of detectors depend on values, which meta tensors do not have
            try:
                found = count(without_cores(subject, subject.build(size), size), size, subject.in_chans, device)
                break
            except UserError:
                raise
            except Exception as error:
                if device == "cpu":
                    raise UserError(
                        f"{subject.name} cannot take images of {size[0]} x {size[1]}: {_reason(error)}"
                    ) from error
        if not found.layers:
            raise UserError(
                f"{subject.name} cannot be timed without attention: linvit cannot replace it, and it makes no call of "
                f"F.scaled_dot_product_attention (0 calls)"
            )
        return found

    def network(self, size: tuple[int, int], dtype: torch.dtype | None = None) -> nn.Module:
        """Returns the network as it is, on the device; networks of one size and precision share its weights."""
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
        row.softmax_blocks = 0 if row.kind == "ceiling" else softmax_blocks(network)
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
            self._calls[row.name] = turns.add(row.name, work)
            if torch.device(settings.device).type == "cuda":
                row.peak = peak_memory(work, settings.device)
        except Exception as error:
            row.note = _reason(error)
            turns.times.pop(row.name, None)
            return False
        row.seconds = turns.times[row.name]
        return True

    def round(self, turns: Turns[str], rows: Sequence[Row], what: str) -> None:
        """Takes a sample of each row, until the time limit is reached."""
        self.say(f"{what}, turn {len(rows[0].seconds) + 1} of {len(rows)} rows")
        start, spent = self.now(), 0.0
        for name in turns.round([row.name for row in rows]):
            spent += turns.times[name][-1] * turns.calls[name]
            if self.left < 0:
                raise TimeIsUpError
        self.pace = (self.now() - start) / spent

    def least(self, size: Measured) -> float:
        """Returns the seconds that a comparison at a size takes at least, by the time of its ceiling."""
        now, ceiling = size.ceiling["now"].median, size.ceiling["ceiling"].median
        return self.pace * (SIEVE + TURNS + 2) * (3 * now + ceiling)  # rivals: as it is, fused or in windows; mechanism

    def measure_ceiling(self, size: Measured, intercepted: bool, until: float) -> None:
        """Measures a network as it is and without cores, until its room is known or so many seconds are left."""
        turns = Turns[str](self.settings.device, self.clock)
        around: Context = InterceptedAttention if intercepted else nullcontext
        network = self.network(size.img_size)
        now = Row(UNCHANGED, "now")
        without = Row("no attention (the ceiling)", "ceiling")
        bare = without_cores(self.subject, network, size.img_size)
        for row, one, context in ((now, network, nullcontext), (without, bare, around)):
            if not self.add(turns, row, one, size.img_size, Way(), context):
                size.notes.append(f"{size.size}: {row.name}: {row.note}")
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
            image = torch.zeros(1, self.subject.in_chans, *size.img_size)
            self.network(size.img_size).eval()(image.to(self.settings.device, self.settings.weights))
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
        """Returns the quickest way to execute softmax in two turns, and rows of the others, which keep these turns.

        A way that is `SLOW` in its first call is not called again, and not measured at larger sizes.
        """
        turns, rows = Turns[str](self.settings.device, self.clock), list[Row]()
        ways = {UNCHANGED: Way(), **{way.label: way for way in self.ways(size, compiled)}}
        if len(ways) == 1:
            return Way(), []
        for name, way in ways.items():
            row = Row(name, "softmax", note=self.slow.get(name, ""))
            network = self.network(size.img_size, way.dtype)
            if not row.note and self.add(turns, row, network, size.img_size, way, nullcontext):
                rows.append(row)
            else:
                size.notes.append(f"{size.size}: {row.name}: {row.note}")
        quickest = min(self._calls[row.name] for row in rows)
        slow = [row for row in rows if self._calls[row.name] > SLOW * quickest and row.name != UNCHANGED]
        for row in slow:
            row.seconds.append(self._calls[row.name])
            times = self._calls[row.name] / quickest
            self.slow[row.name] = f"left out, since at {size.size} it took {times:.1f} times as long as the quickest"
        going = [row for row in rows if row not in slow]
        for _ in range(SIEVE):
            self.round(turns, going, f"{size.size}: SDPA backends, compiler, precision")
        best = min(going, key=lambda row: row.median)
        return ways[best.name], rows

    def quickest(self, specs: Iterable[Spec], size: Measured) -> list[Spec]:
        """Orders mechanisms by the time of one call alone, at the layer with most work, in two turns.

        Mechanisms that cannot be built there are left out.
        """
        cores = cores_of(without_cores(self.subject, self.network(size.img_size), size.img_size))
        if not cores:
            return []
        core = max(cores, key=lambda one: one.grid.num_queries * one.dim * (1 + one.grid.num_keys))
        turns, built = Turns[int](self.settings.device, self.clock), dict[int, Spec]()
        settings, end = self.settings._replace(optimizer=False), self.now() + FIRST_ROUND * self.left
        failed, late = dict[str, list[str]](), list[str]()  # labels of mechanisms by reason

        def make(*shape: int) -> torch.Tensor:
            made = torch.randn(settings.batch, *shape).to(settings.device, settings.weights)
            return made.requires_grad_(settings.backward)

        for i, spec in enumerate(specs):
            self.say(f"first round: {spec_label(spec)}")
            if self.now() > end and built:
                late.append(spec_label(spec))
                continue
            try:
                mechanism = self.mechanism(spec, core, core.grid)
                if mechanism.facts.complexity == "O(N^2)":
                    continue
                inputs, extra = make_inputs(mechanism, core.grid, make)
                turns.add(i, getattr(Runner(mechanism, inputs, extra, settings), settings.passes[-1]))
                built[i] = spec
            except Exception as error:
                failed.setdefault(_reason(error), []).append(spec_label(spec))
        if late:
            failed["the first round took too long"] = late
        size.notes += [f"{', '.join(labels)}: left out, {why}" for why, labels in failed.items()]
        for _ in range(SIEVE):
            for _ in turns.round([*built]):
                pass
        return [built[i] for i in sorted(built, key=lambda i: sum(turns.times[i]))]

    def mechanism(self, spec: Spec, core: Attention, grid: Grid) -> Attention:
        """Returns a mechanism for the layer of a core."""
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
        """Measures rivals and mechanisms of one size in at most about so many seconds, at least one of each."""
        turns = Turns[str](self.settings.device, self.clock)
        around: Context = InterceptedAttention if intercepted else nullcontext
        img_size, network = size.img_size, self.network(size.img_size, way.dtype)
        end = self.now() + seconds

        def add(row: Row, one: nn.Module, at: Any = img_size, how: Way = way, context: Context = nullcontext) -> None:
            if self.add(turns, row, one, at, how, context):
                size.rows.append(row)
            else:
                size.notes.append(f"{size.size}: {row.name}: {row.note}")

        def replaced(row: Row, specs: Sequence[Any]) -> None:
            row.attention = list(specs)
            try:
                made = self.subject.with_attention(network, specs, img_size)
            except UserError as error:
                size.notes.append(f"{size.size}: {row.name}: {error}")
            else:
                add(row, made)

        bare = without_cores(self.subject, network, img_size)
        blocks = len(cores_of(bare))
        softmax = softmax_blocks(network) == blocks
        add(Row(UNCHANGED, "now"), self.network(img_size), how=Way())
        if way != Way():
            add(Row(way.label, "softmax"), network)
        add(Row("no attention (the ceiling)", "ceiling"), bare, how=way._replace(backend=None), context=around)
        if (
            not any(row.name.startswith("softmax, math") for row in ways)
            and blocks
            and "softmax, math" not in self.slow
        ):
            replaced(Row("softmax, fused", "softmax"), ["softmax"] * blocks)  # it makes no call of SDPA
        grids = {core.grid for core in cores_of(bare)}
        plain = len(grids) == 1 and all(grid.kv_size is None for grid in grids)
        length = max(next(iter(grids)).size) if plain else 0
        window = window_side(length) if length > WINDOW else None
        if window and blocks > 4:
            replaced(
                Row("softmax in windows, 4 global blocks", "windows"),
                specs_of({"layout": "vitdet", "window": window}, blocks, softmax),
            )
        call = self._calls.get(UNCHANGED, 0.0)

        def fits(calls: float) -> bool:
            """Returns True if these rows with their turns, and `calls` of the unchanged network, fit the time."""
            costs = [self._calls[row.name] for row in size.rows if row.kind != "mechanism"]
            own = sorted(self._calls[row.name] for row in size.rows if row.kind == "mechanism")
            turned = (SIEVE + TURNS) * sum(costs) + SIEVE * sum(own) + TURNS * sum(own[:JUDGED])
            return self.now() + self.pace * (turned + calls * call) < end

        left_out = list[str]()
        layouts = [
            (spec_label(spec), spec_label(spec), specs_of(spec, blocks, softmax)) for spec in specs if is_layout(spec)
        ]
        each = [placements(spec, blocks, softmax, window) for spec in specs if not is_layout(spec)]
        for row_name, placement, chosen in [*layouts, *(one for same in zip(*each, strict=True) for one in same)]:
            first = not any(row.kind == "mechanism" for row in size.rows)
            if first or fits(2 + SIEVE):
                replaced(Row(row_name, "mechanism", placement=placement, sieved=True), chosen)
            else:
                left_out.append(row_name)
        step = self.subject.multiple
        height, width = (max(1, round(0.75 * side / step)) * step for side in img_size)
        less = height, width
        others = [(f"softmax at {height} x {width}", lambda: self.subject.build(less), less)]
        others += [(f"softmax, {small}", lambda: find_subject(small or "").build(img_size), img_size)] if small else []
        for row_name, build, at in others if less != img_size else others[1:]:
            if fits(2 + SIEVE + TURNS):
                row = Row(row_name, "loses quality")
                row.img_size, row.model = (at, "") if at == less else (None, small or "")
                self.other(size, turns, row, build, at, way)
            else:
                left_out.append(row_name)
        if left_out:
            size.notes.append(
                f"{size.size}: no time for {len(left_out)} rows ({quote_first(left_out)}): more --minutes"
            )
        for _ in range(SIEVE):
            self.round(turns, size.rows, size.size)
        mechanisms = sorted((row for row in size.rows if row.kind == "mechanism"), key=lambda row: row.median)
        rivals = [row for row in size.rows if row.kind != "mechanism"]
        everything = self.now() + self.pace * TURNS * sum(row.median for row in size.rows) < end
        going = [*rivals, *(mechanisms if everything else mechanisms[:JUDGED])]
        for turn in range(MOST_TURNS):
            if turn >= TURNS and (self.now() > end or state_of(size) in ("pays", "loses")):
                break
            self.round(
                turns, going if turn < TURNS else [row for row in going if row.kind != "loses quality"], size.size
            )

    def other(
        self, size: Measured, turns: Turns[str], row: Row, build: Callable[[], nn.Module], at: Any, way: Way
    ) -> None:
        """Adds a row of another network, or of the same at another size."""
        try:
            network = build().to(self.settings.device, way.dtype or self.settings.weights)
        except Exception as error:
            size.notes.append(f"{size.size}: {row.name}: {_reason(error)}")
            return
        if self.add(turns, row, network, at, way, nullcontext):
            size.rows.append(row)
        else:
            size.notes.append(f"{size.size}: {row.name}: {row.note}")


def other_attention(network: nn.Module) -> list[str]:
    """Names of the classes of mechanisms other than softmax that a network has already."""
    mechanisms = [module for module in network.modules() if isinstance(module, Attention)]
    return list(dict.fromkeys(type(one).__name__ for one in mechanisms if not isinstance(one, SoftmaxAttention)))


def specs_of(layout: Any, blocks: int, softmax: bool) -> list[Any]:
    """Specs of a layout for a network that has `softmax` in all blocks or not; None keeps a block's."""
    return [None if softmax and spec == "softmax" else spec for spec in expand_layout(layout, blocks)]


def placements(spec: Spec, blocks: int, softmax: bool, window: int | None) -> list[tuple[str, str, list[Any]]]:
    """Returns names, placements and specs of a mechanism in all blocks, in all but the last two, in the first half.

    Then in JetViT's layout, if there is a window, for so many blocks. Other blocks keep their attention, `softmax` or
    not.
    """
    name = spec_label(spec)
    found: list[tuple[str, str, list[Any]]] = [(f"{name} in all {blocks} blocks", "all", [spec] * blocks)]
    for kept in dict.fromkeys([2, blocks - blocks // 2]):
        if 0 < kept < blocks:
            row_name = f"{name}, last {kept} of {blocks} {'softmax' if softmax else 'unchanged'}"
            found.append((row_name, f"last {kept}", [spec] * (blocks - kept) + [None] * kept))
    if window and blocks in LAYOUTS["jetvit"].full:
        specs = specs_of({"layout": "jetvit", "linear": spec, "window": window}, blocks, softmax)
        found.append((f"{name}, windows and softmax, layout jetvit", "jetvit", specs))
    return found


def _reason(error: Exception) -> str:
    """Returns why a row is left out, in one line."""
    first = str(error).strip().partition("\n")[0]
    if out_of_memory(error):
        return "out of memory"
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
