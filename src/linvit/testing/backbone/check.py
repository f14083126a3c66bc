"""`check_backbone`: timm's contract and what linvit adds to it, applied to one backbone."""

from collections.abc import Callable, Sequence

from torch import nn

from linvit.registry import Spec
from linvit.testing import behaviour
from linvit.testing.backbone import numerics, shape
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.report import Check, Contract, Report

CONTRACT = Contract(
    first=(Check("constructor", behaviour.constructor),),
    clauses=(
        Check("shapes", shape.shapes),
        Check("pyramid", shape.feature_pyramid),
        Check("intermediates", shape.intermediates),
        Check("pruning", shape.pruning),
        Check("any input", shape.input_sizes),
        Check("height and width", shape.height_and_width),
        Check("classifier", shape.classifier),
        Check("another attention", shape.another_attention),
        behaviour.BATCH_INDEPENDENCE,
        *behaviour.COMMON,
        Check("checkpointing", numerics.checkpointing),
        Check("stochastic depth", numerics.stochastic_depth),
        Check("parameter groups", numerics.parameter_groups),
        *numerics.NUMERICS,
        *behaviour.COMPILER,
        behaviour.ONNX,
    ),
)


def check_backbone(
    spec_or_callable: Spec | Callable[..., nn.Module],
    attention: Spec | Sequence[Spec] | None = None,
    *,
    img_size: int | Sequence[int] = 64,
    quick: bool = False,
) -> Report:
    """Checks on the CPU that a backbone keeps timm's contract, and takes images of any size and any attention.

    Parameters are moved away from their initial values first. An exception inside a check, `sys.exit` included, is that
    check's failure, and is quoted where it happens first; a size that the backbone refuses by a `UserError` that names
    it is "not supported".

    Args:
        spec_or_callable: A registered name, `{name: ..., option: value}`, "package.module:Class", or the class or
            function itself.
        attention: One spec for all blocks, or a list, as the backbone takes it; None leaves its own.
        img_size: Side, or (H, W), of the images of most lines and of the instances for them; "any input" builds for the
            constructor's own size.
        quick: Leave out `torch.compile`, `torch.export`, ONNX and the largest images.

    Raises:
        UserError: If there is no such backbone, or it refuses its options.

    Example:
        >>> from linvit.testing import check_backbone
        >>> report = check_backbone("flatten_swin_tiny", quick=True)
        >>> assert report.passed, report
    """
    return CONTRACT.report(BackboneSubject(spec_or_callable, attention, img_size, quick), quick)
