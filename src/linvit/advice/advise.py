"""`linvit.advise`: one sentence on whether another attention makes a network faster, and the table behind it."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from tqdm.auto import tqdm

from linvit.advice.bench import Bench, TimeIsUpError, Way
from linvit.advice.comparison import Comparison
from linvit.advice.count import square_root_steps
from linvit.advice.mechanisms import other_attention, quickest, usual
from linvit.advice.report import Advice
from linvit.advice.rivals import smaller
from linvit.advice.softmax import best_way, measure_ceiling
from linvit.advice.subject import Subject, cores_of, find_subject, without_cores
from linvit.advice.verdict import BUSY, UNCHANGED, Measured, Row, decide, decide_by_score, room_of
from linvit.errors import UserError, check_choice, check_number
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.bench.runner import DTYPES, Settings
from linvit.experiments.measure import processor_share
from linvit.image_size import image_size
from linvit.io import machine
from linvit.registry import Spec, attentions
from linvit.registry.layouts import expand_layout, is_layout
from linvit.runs.conditions import conditions, cpu_load

if TYPE_CHECKING:
    from linvit.advice.quality import Quality

LARGEST, TIMES = 1024, 4  # side of the default sizes, at most, and over the network's own
CEILINGS = 0.3  # of the time limit, at most, to resolve ceilings
MECHANISMS = 6  # that are measured if none are named
MEASURING = 0.95  # of the time limit; imports and the page take the rest


def advise(
    model: str | Path | nn.Module,
    img_size: int | Sequence[int | Sequence[int]] | None = None,
    *,
    mode: Literal["inference", "train"] = "inference",
    device: str = "cpu",
    dtype: str = "float32",
    batch_size: int = 1,
    attention: Spec | Sequence[Spec] | None = None,
    minutes: float = 5.0,
    smaller_model: str | None = None,
    compile: bool = False,
    all_sizes: bool = False,
    threads: int | None = None,
    data: str | None = None,
    hours: float = 0.5,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] | None = None,
) -> Advice:
    """Measures whether another attention makes a network faster on this device, from which image size, and which.

    First come the operations of the cores of attention, then the time without them, which no attention between the same
    projections can beat. Where that leaves no room, the answer is no. Else mechanisms in all blocks, in all but two, in
    half of them and in JetViT's layout are measured in turns with softmax attention at its best and in windows. Quality
    is not measured.

    Args:
        model: A name of timm or linvit, a run or file that `linvit.load` takes, or a module.
        img_size: Side of the images, or several; a size may be (H, W). None takes the network's own, then steps of
            sqrt(2) up to four times that or 1024.
        mode: "inference", or "train": a training step with AdamW.
        device: "cpu" or a CUDA device.
        dtype: Of weights and images. On a GPU float32 has bfloat16 as a rival.
        batch_size: Images per call.
        attention: Mechanisms, names or specs, and layouts of blocks, `{layout: ...}`; "*" takes all mechanisms.
            None takes the six that are quickest alone, of those that project q, k and v and have no parameters per
            token.
        minutes: Time limit. Rows that are not measured by then are left out and listed.
        smaller_model: A rival, as `model`; None looks for timm's next smaller model of the family.
        compile: Also measure softmax compiled, and mechanisms likewise if that is faster.
        all_sizes: Measure mechanisms also at sizes without room.
        threads: torch's threads on a CPU. None means torch's default, or one and its CPU time if the machine is busy.
        data: Images, as `--data.source`. Then mechanisms and rivals of one size learn for equal times from the network,
            which must have trained weights, and the answer is that of score over time on images that were held out.
        hours: Time limit of all of this training.
        say: Called with each line of the result as it comes.
        clock: Seconds, for tests.

    Returns:
        The verdict with all rows; `str` of it is the output of `linvit advise`. Ctrl-C returns the results so far.

    Raises:
        UserError: If there is no such model, it does not accept a size, or its attention cannot be removed.

    Example:
        >>> linvit.advise("vit_tiny_patch16_224", img_size=(224, 448)).verdict.answer
        'room'
    """
    check_choice("mode", mode, ["inference", "train"])
    check_choice("dtype", dtype, DTYPES)
    check_number("batch_size", batch_size, at_least=1, whole=True)
    check_number("minutes", minutes, above=0)
    check_number("hours", hours, above=0)
    start, cpu = time.monotonic(), torch.device(device).type == "cpu"
    told = say or (lambda text: None)
    if attention is not None and attention != "*":
        for spec in [attention] if isinstance(attention, str | dict) else attention:
            if not is_layout(spec):
                attentions.get(attentions.parse(spec)[0])
    subject = find_subject(model)
    sizes = _sizes(img_size, subject.own, subject.multiple)
    shares = [processor_share()] if cpu and clock is None else []
    before = torch.get_num_threads()
    if threads is not None:
        check_number("threads", threads, at_least=1, whole=True)
    elif shares and shares[0] * BUSY < 1:
        threads = 1
    if cpu and threads is not None:
        torch.set_num_threads(threads)
    own_clock = time.process_time if cpu and torch.get_num_threads() == 1 else time.perf_counter
    train = mode == "train"
    settings = Settings(device, DTYPES[dtype], backward=train, optimizer=train, batch=batch_size)
    bench = Bench(
        subject,
        settings,
        limit=MEASURING * 60 * minutes - (time.monotonic() - start),
        clock=clock or own_clock,
    )
    known = conditions(device) | {
        "settings": f"{mode}, batch {batch_size}, {dtype}, {'eager and compiled' if compile else 'eager'}",
        "clock": "processor time" if own_clock is time.process_time else "clock",
    }
    advice = Advice(subject, known)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it hides the attention of nn.MultiheadAttention
    quiet = False if tqdm.__module__ == "tqdm.auto" else None  # a notebook, or a terminal where there is one
    limited = machine.memory_limit() if cpu else nullcontext()
    try:
        with (
            suppress(KeyboardInterrupt),
            limited,
            tqdm(bar_format="{desc}", leave=False, disable=quiet) as line,
        ):

            def progress(text: str) -> None:
                line.set_description_str(f"{max(0.0, bench.left):.0f} s left at most; {text}", refresh=False)
                line.update(0)

            bench.say = progress
            advice.stopped = "interrupted"
            _count(bench, advice, sizes, img_size is not None, told)
            quality = _quality(subject, data, hours, bench)
            ended = ""
            try:
                _measure(bench, advice, attention, smaller_model, compile, all_sizes, told, shares)
            except TimeIsUpError:
                ended = f"stopped after {minutes:g} minutes"
            if quality is not None:
                _score(quality, advice, told)
            advice.stopped = ended
    finally:
        for size in advice.sizes:
            size.rows = [row for row in size.rows if row.seconds]
            size.ceiling = {kind: row for kind, row in size.ceiling.items() if row.seconds}
        torch.backends.mha.set_fastpath_enabled(fast_path)
        if cpu and clock is None:
            shares.append(processor_share())
        torch.set_num_threads(before)
    busy = 1 / max(sorted(shares)[len(shares) // 2], 1e-3) if shares else 1.0
    known |= {"load at the end": cpu_load(), "clock over processor time": f"{busy:.2f}" if shares else "not measured"}
    advice.verdict = decide(subject.name, advice.sizes, busy)
    scored = next((size for size in advice.sizes if advice.quality and any(row.score for row in size.rows)), None)
    if scored is not None:
        load = f" The machine was busy: clock {busy:.1f} x processor time." if busy > BUSY else ""
        advice.verdict = decide_by_score(subject.name, scored, advice.quality, load)
    return advice


def _sizes(given: Any, own: tuple[int, int], multiple: int) -> list[tuple[int, int]]:
    if given is None:
        if own[0] != own[1]:
            return [own]
        return [(side, side) for side in square_root_steps(own[0], max(min(LARGEST, TIMES * own[0]), own[0]), multiple)]
    each = [given] if isinstance(given, int) else list(given)
    found = [image_size(one) for one in each]
    if not found:
        raise UserError("img_size must name at least one size, such as 224; got none")
    return sorted(dict.fromkeys(found), key=lambda size: size[0] * size[1])


def _count(
    bench: Bench, advice: Advice, sizes: Sequence[tuple[int, int]], named: bool, told: Callable[[str], None]
) -> None:
    for size in sizes:
        bench.say(f"{size[0]} x {size[1]}: counting")
        try:
            found = bench.count(size)
        except UserError as error:
            if named or not advice.sizes:
                raise
            advice.notes.append(str(error))
            break  # a network that takes its own size alone
        advice.sizes.append(Measured(size, found.bound, found.tokens))
        advice.intercepted = advice.intercepted or found.intercepted > 0
    told("counted, faster without attention: " + ", ".join(f"{x.counted:.2f}x at {x.size}" for x in advice.sizes))


def _measure(
    bench: Bench,
    advice: Advice,
    attention: Any,
    small: str | None,
    compile: bool,
    all_sizes: bool,
    told: Callable[[str], None],
    shares: list[float],
) -> None:
    if own := other_attention(bench.network(advice.sizes[0].img_size)):
        advice.notes.append(f"the unchanged network has {', '.join(own)}; counted is as if it had softmax attention")
    if bench.subject.several_sizes:
        advice.notes.append(
            "the network was trained with --data.token_budget, and each row here is of images of one size. A batch of "
            "several sizes takes the time of its tokens: give --img_size a size of as many patches as your images have"
        )
    given = [attention] if isinstance(attention, str | dict) else attention or []
    layouts: list[Any] = [spec for spec in given if is_layout(spec)]
    if layouts:
        network = without_cores(advice.subject, bench.network(advice.sizes[0].img_size), advice.sizes[0].img_size)
        for spec in layouts:  # one that does not fit ends it before anything is measured
            expand_layout(spec, len(cores_of(network)))
    budget, last = bench.left, advice.sizes[0]
    for i, size in enumerate(advice.sizes):
        if last.room.samples:
            tokens = size.tokens / max(last.tokens, 1)
            expected = (
                8 * bench.pace * (last.ceiling["now"].median * tokens**2 + last.ceiling["ceiling"].median * tokens)
            )
            if expected > bench.left / 2:
                size.notes.append(f"{size.size} and above: left out, since a ceiling takes up to {expected:.0f} s")
                break
        last, done = size, (i + 1) / len(advice.sizes)
        measure_ceiling(bench, size, advice.intercepted, budget * (1 - CEILINGS * done))
        if shares:
            shares.append(processor_share())
        if size.room.samples:
            told(_ceiling_line(size))
    measured = [size for size in advice.sizes if size.room.samples]
    chosen = [size for size in measured if all_sizes or room_of(size) != "closed"]
    if not chosen:
        return
    smaller_model = small or (smaller(advice.subject.timm) if advice.subject.timm else None)
    advice.smaller = smaller_model or "none found"
    named = attention is not None and attention != "*"
    largest = max(chosen, key=lambda size: size.tokens)
    mechanisms = [spec for spec in given if spec not in layouts]
    pool = mechanisms if named else attentions.names() if attention == "*" else usual(bench, largest)
    specs = quickest(bench, pool, largest)
    specs = [*layouts, *(specs if attention is not None else specs[:MECHANISMS])]
    told(f"quickest alone at {largest.size}: {', '.join(map(spec_label, specs)) or 'none'}")
    for i, size in enumerate(chosen):  # from the smallest: equal shares of the time; unused time is passed on
        if bench.least(size) > bench.left:
            size.notes.append(f"{size.size}: rivals and mechanisms left out, since they take more than the time left")
            continue
        end = bench.left * (1 - 1 / (len(chosen) - i))
        way, ways = best_way(bench, size, compile)
        others = [row for row in ways if row.name not in (UNCHANGED, way.label if way != Way() else "")]
        advice.ways += [(size.img_size, row) for row in others]
        comparison = Comparison(bench, size, way, bench.left - end)
        comparison.add_rivals(ways, advice.intercepted)
        comparison.add_mechanisms(specs)
        comparison.add_cheaper(smaller_model)
        comparison.take_turns()
        if shares:
            shares.append(processor_share())
        told(_best_line(size))


def _quality(subject: Subject, data: str | None, hours: float, bench: Bench) -> "Quality | None":
    if data is None:
        return None
    from linvit.advice.quality import Quality  # imports what reads data

    return Quality(subject, data, hours, bench)


def _score(quality: "Quality", advice: Advice, told: Callable[[str], None]) -> None:
    """Trains and scores at the size from which on a mechanism is faster, or else at the largest compared one."""
    compared = [size for size in advice.sizes if size.candidates]
    if not compared:
        advice.notes.append("quality was not measured: at no size a mechanism was measured beside the rivals")
        return
    first = decide(advice.subject.name, advice.sizes).from_size
    size = next((one for one in compared if one.img_size == first), compared[-1])
    quality.measure(size, told)
    advice.quality = quality.about


def _ceiling_line(size: Measured) -> str:
    room = size.room
    answer = {"closed": "no room", "open": "room", "unclear": "unclear"}[room_of(size)]
    return (
        f"{size.size}: at most {room.median:.2f}x ({room.low:.2f} to {room.high:.2f}, {room.samples} turns), counted "
        f"{size.counted:.2f}x: {answer}"
    )


def _best_line(size: Measured) -> str:
    rival = size.best_rival
    best: Row | None = min(size.candidates, key=lambda row: row.median, default=None)
    if rival is None or best is None:
        return f"{size.size}: no mechanism was measured"
    return f"{size.size}: {rival.name} {1e3 * rival.median:.3g} ms, {best.name} {1e3 * best.median:.3g} ms"
