"""`check_attention`: the contract of attention mechanisms, applied to one of them."""

from linvit.attention.base import Attention
from linvit.registry import Spec
from linvit.testing import behaviour
from linvit.testing.attention import declarations, host, matrix, precision, shape
from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.report import Check, Contract, Report

TAKE_THE_SIZE = "it works at 14x14, so take the size from grid and not from the number of tokens"
FOLLOW = "take all sizes from the grid of the call, or refuse it by a linvit.UserError that names it, as 7x9"
HALF = "run the delicate part in float32: decorate forward, or a method (self, q, k, v), with @linvit.full_precision"
AS_MANY = "if keys must be as many as queries, declare fewer_keys = False"
AS_WIDE = "if keys must be as wide as values, declare narrow_keys = False"


def _numerics(one: precision.Precision) -> Check:
    advice = HALF if one.dtype.itemsize == 2 else ""
    return Check(f"numerics, {one.name}", precision.numerics(one), advice=advice)


CONTRACT = Contract(
    first=(
        Check("constructor", behaviour.constructor),
        Check("declarations", declarations.declarations),
    ),
    clauses=(
        Check("shape and dtype", shape.shape),
        Check("grids", shape.grids, advice=TAKE_THE_SIZE),
        Check("another size", shape.another_size, advice=FOLLOW),
        Check("resizes its tables", shape.resizes_its_tables),
        Check("prefix tokens", host.prefix_tokens),
        Check("spatial reduction", host.spatial_reduction, advice=AS_MANY),
        Check("narrow keys", host.narrow_keys, advice=AS_WIDE),
        Check("attention layer", host.attention_layer),
        Check("position bias", host.position_bias),
        Check("masked keys", host.masked_keys),
        behaviour.BATCH_INDEPENDENCE,
        *behaviour.COMMON,
        Check("memory layout", shape.memory_layout),
        Check("order of tokens", shape.order_of_tokens),
        Check("NaN propagates", shape.nan_propagates),
        Check("equivalent matrix", matrix.equivalent_matrix),
        Check("factors", matrix.factors),
        Check("matrix parts", matrix.matrix_parts),
        Check("channel matrix", matrix.channel_matrix),
        Check("rank", matrix.rank_bound),
        *map(_numerics, precision.PRECISIONS),
        Check("numerics on a GPU", precision.numerics_on_a_gpu),
        Check("growth of work", declarations.growth_of_work),
        *behaviour.COMPILER,
        behaviour.ONNX,
    ),
)


def check_attention(
    spec_or_class: Spec | type[Attention], *, quick: bool = False, dim: int = 32, num_heads: int = 2
) -> Report:
    """Checks on the CPU that a mechanism keeps the contract of `linvit.Attention`.

    It is compared with its own declarations: see the attributes of `linvit.Attention`. Where a declaration cannot be
    read, or `forward` gives nothing to look at, there are no other lines. Parameters are moved away from their initial
    values first. An exception inside a check, `sys.exit` included, is that check's failure, and is quoted where it
    happens first; a size that is refused by a `UserError` is "not supported".

    Args:
        spec_or_class: A registered name, `{name: ..., option: value}`, "package.module:Class", or the class itself.
        quick: Leave out `torch.compile`, `torch.export`, ONNX and the largest numbers of tokens.
        dim: Channels C of the instances.
        num_heads: Their heads h.

    Raises:
        UserError: If there is no such mechanism, or it refuses its options.

    Example:
        >>> from linvit.testing import check_attention
        >>> report = check_attention("focused", quick=True)
        >>> assert report.passed, report
    """
    return CONTRACT.report(AttentionSubject(spec_or_class, dim, num_heads, quick), quick)
