"""Which features a backbone has, and which of them are asked for, as timm's feature extraction writes it."""

from collections.abc import Sequence

from linvit.errors import UserError


def pyramid_info(dims: Sequence[int], stride: int = 4) -> list[dict[str, str | int]]:
    """Returns the `feature_info` of stages with these channels; the first has this stride, each next twice as much."""
    return [{"module": f"stages.{i}", "num_chs": dim, "reduction": stride * 2**i} for i, dim in enumerate(dims)]


def feature_indices(count: int, indices: int | Sequence[int] | None) -> list[int]:
    """Returns the features that timm's `indices` select of `count`: None all, n the last n, a list those in it."""
    if indices is None:
        return list(range(count))
    if isinstance(indices, int):
        indices = range(-indices, 0)
    if not indices or not all(-count <= index < count for index in indices):
        raise UserError(
            f"feature indices {list(indices)} do not fit {count} features; allowed: {-count} to {count - 1}"
        )
    return [index % count for index in indices]
