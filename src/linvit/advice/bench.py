"""Builds the networks of a subject, and takes samples of them in turns until a time limit."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from linvit.advice.count import Counted, count
from linvit.advice.subject import Subject, without_cores
from linvit.advice.verdict import SIEVE, Measured, Row
from linvit.backbones.replace_attention import softmax_blocks
from linvit.errors import UserError
from linvit.experiments.bench.runner import Runner, Settings
from linvit.experiments.measure import Turns, out_of_memory, peak_memory

TURNS = 6  # needed for a 95 % interval by ranks
MOST_TURNS = 60
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
        self.end = now() + limit
        self.pace = 1.0  # seconds of the limit that pass per second of the clock
        self.slow = dict[str, str]()  # ways to execute softmax that are not measured again, with the reason
        self.calls = dict[str, float]()  # seconds of a call by row
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
                        f"{subject.name} cannot take images of {size[0]} x {size[1]}: {reason(error)}"
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
            self.calls[row.name] = turns.add(row.name, work)
            if torch.device(settings.device).type == "cuda":
                row.peak = peak_memory(work, settings.device)
        except Exception as error:
            row.note = reason(error)
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


def reason(error: Exception) -> str:
    """Returns why a row is left out, in one line."""
    first = str(error).strip().partition("\n")[0]
    if out_of_memory(error):
        return "out of memory"
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
