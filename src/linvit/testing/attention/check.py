"""`check_attention`: the contract of attention mechanisms, held over one of them."""

import time

from linvit.attention.base import Attention
from linvit.errors import UserError
from linvit.registry import Spec
from linvit.testing.attention import (
    behaviour,
    compile,
    cost,
    declarations,
    growth,
    matrix,
    numerics,
    shape,
)
from linvit.testing.attention.inputs import Subject
from linvit.testing.report import CRASHES, Line, Report, Verdict, crash
from linvit.testing.runner import Check, run

DECLARATIONS: Check[Subject] = Check("declarations", declarations.declarations)
CHECKS: tuple[Check[Subject], ...] = (
    Check("shape and dtype", shape.shape),
    Check("grids", shape.grids),
    Check("another size", shape.another_size),
    Check("prefix tokens", shape.prefix_tokens),
    Check("spatial reduction", shape.spatial_reduction),
    Check("narrow keys", shape.narrow_keys),
    Check("attention layer", shape.attention_layer),
    Check("position bias", shape.position_bias),
    Check("batch independence", behaviour.batch_independence),
    Check("gradients", behaviour.gradients),
    Check("determinism", behaviour.determinism),
    Check("copies", behaviour.copies),
    Check("memory layout", behaviour.memory_layout),
    Check("NaN propagates", behaviour.nan_propagates),
    Check("equivalent matrix", matrix.equivalent_matrix),
    Check("factors", matrix.factors),
    Check("rank", matrix.rank_bound),
    *(Check(f"finite, {precision.name}", numerics.finite(precision)) for precision in numerics.PRECISIONS),
    *(Check(f"error, {precision.name}", numerics.error(precision)) for precision in numerics.PRECISIONS),
    Check("cost", cost.cost),
    Check("growth of work", growth.growth_of_work),
    Check("growth of time", growth.growth_of_time),
    Check("torch.compile", compile.compiles, quick=False),
    Check("torch.export", compile.exports, quick=False),
)


def check_attention(
    spec_or_class: Spec | type[Attention], *, quick: bool = False, dim: int = 32, num_heads: int = 2
) -> Report:
    """Holds a mechanism to the contract of `linvit.Attention`, on the CPU.

    What the mechanism declares is what it is held to: see the attributes of `linvit.Attention`. Where a declaration
    cannot be read, or `forward` gives nothing to look at, there are no other lines. Parameters are moved away from
    their initial values first. An exception inside a check, `sys.exit` included, is that check's failure; a size that
    is refused by a `UserError` is "not supported".

    Args:
        spec_or_class: A registered name, `{name: ..., option: value}`, "package.module:Class", or the class itself.
        quick: Leave out `torch.compile`, `torch.export` and the largest numbers of tokens.
        dim: Channels C of the instances.
        num_heads: Their heads h.

    Raises:
        UserError: If there is no such mechanism, or it refuses its options.

    Example:
        >>> from linvit.testing import check_attention
        >>> report = check_attention("focused", quick=True)
        >>> assert report.passed, report
    """
    start = time.perf_counter()
    subject = Subject(spec_or_class, dim, num_heads, quick)
    lines = []
    try:
        subject.build()
    except UserError:
        raise
    except CRASHES as error:
        lines.append(Line("construction", *crash(error)))
    else:
        lines += run([DECLARATIONS], subject, quick)
        if lines[0].verdict is Verdict.PASS:
            lines += run(CHECKS, subject, quick)
    return Report(str(subject), tuple(lines), time.perf_counter() - start)
