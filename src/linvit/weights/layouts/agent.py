"""The parameters of Agent Attention in the checkpoints of its authors, in whichever family they stand."""

from collections.abc import Callable

from torch import Tensor

from linvit.weights.layouts.layout import Rename


def agents_before_places(tensor: Tensor) -> Tensor:
    """A bias of the queries, (1, h, H, 1, n), (1, h, 1, W, n) or (1, h, 1, n), as (h, n, ...)."""
    table = tensor.squeeze(0)
    return table.movedim(-1, 1) if table.ndim > 2 else table


RENAMES: tuple[Rename, ...] = ((r"(?<!tables)\.(?:mechanism\.)?((?:a[nhwc]|[nhwc]a)_bias)$", r".mechanism.tables.\1"),)
CONVERSIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    (r".*(?<!tables)\.a[hwc]_bias", lambda tensor: tensor.squeeze(0)),
    (r".*(?<!tables)\.[hwc]a_bias", agents_before_places),
)
