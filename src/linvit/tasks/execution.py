"""How a network is executed, which changes no result: with less memory or with more."""

from torch import nn

from linvit.errors import UserError


def enable_grad_checkpointing(network: nn.Module) -> None:
    """Lets a network compute activations again in the backward pass instead of keeping them.

    If the network has no `set_grad_checkpointing` of its own, that of its direct parts is called, such as a backbone's
    below a dense head.
    """
    candidates = [network] if hasattr(network, "set_grad_checkpointing") else network.children()
    parts = [part for part in candidates if hasattr(part, "set_grad_checkpointing")]
    try:
        for part in parts:
            part.set_grad_checkpointing(True)  # type: ignore[operator]
        supported = bool(parts)
    except AssertionError:  # how timm's models refuse it
        supported = False
    if not supported:
        raise UserError(
            f"{type(network).__name__} has no gradient checkpointing; set --model.grad_checkpointing=false and lower "
            f"--data.batch_size, with --trainer.accumulate_grad_batches to make up for it"
        )


def keep_attention_features(network: nn.Module) -> None:
    """Lets attention, its stems and its gates keep what the backward pass needs (`recompute` of the modules)."""
    for module in network.modules():
        if hasattr(module, "recompute"):
            module.recompute = False  # type: ignore[assignment]
