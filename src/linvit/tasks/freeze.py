"""Parameters that a task does not train."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from linvit.backbones.initialise import classifiers
from linvit.errors import UserError, quote_first


def freeze_parameters(network: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freezes the parameters whose names match one of the patterns; returns the modules that are frozen whole.

    The patterns are those of a shell, of names of parameters or modules: "stages.0", "*.mlp". Names may have the
    "backbone." that they have below a head, or not; a classifier is not of the backbone. The modules are in evaluation
    mode. A `UserError` says if a pattern matches no parameter, or if none is left to train.
    """
    if not patterns:
        return []
    parameters = dict(network.named_parameters())
    of_head = {id(parameter) for module in classifiers(network) for parameter in module.parameters()}
    names = {name: {name, name.removeprefix("backbone.")} for name in parameters}
    if not hasattr(network, "backbone"):
        names |= {name: {name, f"backbone.{name}"} for name, one in parameters.items() if id(one) not in of_head}
    for pattern in patterns:
        ways = (pattern, f"{pattern}.*")
        matched = [name for name, own in names.items() if any(fnmatchcase(one, way) for one in own for way in ways)]
        if not matched:
            some = ", ".join(list(parameters)[:: max(1, len(parameters) // 4)])
            raise UserError(f"freeze: no parameter of the network is called {pattern!r}. Names are like {some}")
        for name in matched:
            parameters[name].requires_grad_(False)
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if len(frozen) == len(parameters):
        raise UserError(f"freeze: {list(patterns)} leave no parameter to train")
    rank_zero_info(f"frozen: {len(frozen)} of {len(parameters)} tensors of parameters: {quote_first(frozen)}")
    whole = [
        module
        for module in network.modules()
        if list(module.parameters()) and not any(parameter.requires_grad for parameter in module.parameters())
    ]
    for module in whole:
        module.eval()  # BatchNorm keeps its statistics, dropout is off
    return whole
