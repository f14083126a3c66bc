"""Settings of a task that make no sense, told before anything is built."""

from linvit.errors import UserError, check_choice, check_number


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
    if lr <= 0:
        raise UserError(f"lr must be positive; got {lr}")
    if warmup_epochs < 0 or cooldown_epochs < 0 or lr_lag < 0:
        raise UserError(
            f"warmup_epochs, cooldown_epochs and lr_lag must be 0 or more; "
            f"got {warmup_epochs}, {cooldown_epochs} and {lr_lag}"
        )
    check_choice("lr_interval", lr_interval, ["step", "epoch"])
    check_choice("lr_scaled", lr_scaled, ["all", "peak"])
    if lr_batch is not None and lr_batch < 1:
        raise UserError(f"lr_batch must be a number of images, such as 512, or null; got {lr_batch}")
    if published_batch is not None:
        check_number("published_batch", published_batch, at_least=1, whole=True, note=", or null for none")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise UserError(f"layer_decay must lie in (0, 1], such as 0.75, or be null; got {layer_decay}")
    check_number("body_lr_scale", body_lr_scale, above=0)
