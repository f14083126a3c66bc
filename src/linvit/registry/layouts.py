"""Layouts by name: which blocks of a network have full softmax attention, windows, or linear attention.

`{layout: vitdet, window: 14}` stands for a list with one spec per block, for any number of blocks. Blocks
are counted from 0, over all stages.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from linvit.errors import UserError, check_choice, check_number, did_you_mean
from linvit.registry import Spec


class Layout(NamedTuple):
    """One named layout.

    Attributes:
        kinds: Returns "linear", "window" or "full" for each of so many blocks, before `full` is applied.
        takes: Options beside `layout`.
        summary: Description with the source, one line.
        full: Blocks of full softmax attention by the number of blocks, for layouts whose source lists them.
    """

    kinds: Callable[[int], list[str]]
    takes: tuple[str, ...]
    summary: str
    full: Mapping[int, Sequence[int]] = {}


def _vitdet(depth: int) -> list[str]:
    full = {-(-i * depth // 4) - 1 for i in range(1, 5)}
    return ["full" if i in full else "window" for i in range(depth)]


def _half(first: str, last: str) -> Callable[[int], list[str]]:
    return lambda depth: [first] * (depth // 2) + [last] * (depth - depth // 2)


LAYOUTS = {
    "jetvit": Layout(
        lambda depth: ["window" if i % 2 else "linear" for i in range(depth)],
        ("linear", "window", "full"),
        "linear and windows in turn, two full blocks as in JetViT (Zou et al. 2026), which searched the others",
        {12: (7, 10), 24: (14, 22)},
    ),
    "vitdet": Layout(
        _vitdet,
        ("window", "full"),
        "windows, and the last block of each quarter full (ViTDet, Li et al. 2022)",
    ),
    "first_half": Layout(_half("full", "linear"), ("linear",), "full in the first half, linear in the rest"),
    "last_half": Layout(_half("linear", "full"), ("linear",), "linear in the first half, full in the rest"),
}
"""Layouts by name."""


def window_side(length: int, most: int = 14) -> int:
    """Returns the side of windows of at most so many patches that leaves least to be padded on a grid's longer side."""
    return -(-length // -(-length // most))


def is_layout(spec: Any) -> bool:
    """True if a spec names a layout."""
    return isinstance(spec, Mapping) and "layout" in spec


def block_kinds(name: str, depth: int, full: Sequence[int] | None = None) -> list[str]:
    """Returns "linear", "window" or "full" for each of `depth` blocks of a layout.

    Args:
        name: Name of the layout.
        depth: Blocks of the network.
        full: Blocks of full softmax attention; None means the layout's own.

    Raises:
        UserError: If the layout does not exist, lists no full blocks for this depth, or `full` contains a block that
            the network does not have.
    """
    check_choice("layout", name, LAYOUTS)
    layout = LAYOUTS[name]
    kinds = layout.kinds(depth)
    if full is None:
        if not layout.full:
            return kinds
        if depth not in layout.full:
            known = " and ".join(map(str, layout.full))
            raise UserError(
                f"layout '{name}' lists its full blocks for networks of {known} blocks; this one has {depth}. "
                f"Write {{layout: {name}, full: [{depth // 2}, {depth - 1}]}}, with the blocks that you want"
            )
        full = layout.full[depth]
    if isinstance(full, str) or not isinstance(full, Sequence):
        raise UserError(f"full must be a list of blocks, such as [7, 10]; got {full!r}")
    for block in full:
        check_number("full: a block", block, at_least=0, at_most=depth - 1, whole=True)
    others = ["window" if kind == "full" else kind for kind in kinds]
    return ["full" if i in full else kind for i, kind in enumerate(others)]


def expand_layout(spec: Mapping[str, Any], depth: int) -> list[Spec]:
    """Returns one attention spec per block for a spec `{layout: NAME, ...}`.

    Args:
        spec: `layout`, and as far as the layout takes them `linear`, a spec ("linear" by default), `window`, the side
            of the windows in patches (14), and `full`, a list of blocks of softmax attention.
        depth: Blocks of the network.

    Raises:
        UserError: If the layout is unknown, does not take an option, or does not fit the network.

    Example:
        >>> expand_layout({"layout": "first_half", "linear": "focused"}, 4)
        ['softmax', 'softmax', 'focused', 'focused']
    """
    options = dict(spec)
    name = options.pop("layout")
    check_choice("layout", name, LAYOUTS)
    takes = LAYOUTS[name].takes
    for option in options:
        if option not in takes:
            hint = did_you_mean(option, takes)
            raise UserError(f"layout '{name}' takes no option '{option}'.{hint}\n  options: {', '.join(takes)}")
    side = options.get("window", 14)
    check_number("window", side, at_least=1, whole=True)
    specs: dict[str, Spec] = {
        "full": "softmax",
        "linear": options.get("linear", "linear"),
        "window": {"name": "window", "window_size": side},
    }
    return [specs[kind] for kind in block_kinds(name, depth, options.get("full"))]
