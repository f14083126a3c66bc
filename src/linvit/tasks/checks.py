"""Settings of a task that make no sense, told before anything is built."""

from linvit.errors import check_choice, check_number


def check_optimisation(
    lr: float,
    warmup_epochs: float,
    cooldown_epochs: float,
    lr_interval: str,
    lr_lag: int,
    lr_batch: int | None,
    lr_scaled: str,
    published_batch: int | None,
    layer_decay: float | None,
    body_lr_scale: float,
) -> None:
    """Raises a `UserError` for a setting of the optimiser or the schedule that makes no sense."""
    check_number("lr", lr, above=0)
    check_number("warmup_epochs", warmup_epochs, at_least=0)
    check_number("cooldown_epochs", cooldown_epochs, at_least=0)
    check_number("lr_lag", lr_lag, at_least=0, whole=True)
    check_choice("lr_interval", lr_interval, ["step", "epoch"])
    check_choice("lr_scaled", lr_scaled, ["all", "peak"])
    if lr_batch is not None:
        check_number("lr_batch", lr_batch, at_least=1, whole=True, note=", such as 512, or null for none")
    if published_batch is not None:
        check_number("published_batch", published_batch, at_least=1, whole=True, note=", or null for none")
    if layer_decay is not None:
        check_number("layer_decay", layer_decay, above=0, at_most=1, note=", such as 0.75, or null for none")
    check_number("body_lr_scale", body_lr_scale, above=0)
