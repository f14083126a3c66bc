"""What a training run prints when it has ended: its best scores, and the commands to go on with."""

from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint


def run_summary(best: ModelCheckpoint, best_ema: ModelCheckpoint | None, run: Path) -> str:
    """Best score, its checkpoint, and the commands to go on with.

    Args:
        best: The callback that kept the best checkpoint.
        best_ema: The callback that kept the best moving average, if there is one.
        run: Folder of the run.
    """
    checkpoint = Path(best.best_model_path)
    config, last = shown(run / "config.yaml"), shown(checkpoint.with_name("last.ckpt"))
    lines = _best(best)
    if best_ema is not None and best_ema.best_model_path:
        lines += _best(best_ema)
    lines += [
        f"test it         linvit test --config {config} --ckpt_path {shown(checkpoint)}",
        f"go on training  linvit fit --config {config} --ckpt_path {last} --trainer.max_epochs=MORE",
        f"look at it      tensorboard --logdir {shown(run.parent)}",
    ]
    return "\n" + "".join(f"  {line}\n" for line in lines)


def how_to_go_on(run: Path) -> str:
    """What a run prints that something has ended: how to go on with it."""
    last = run / "checkpoints" / "last.ckpt"
    if not last.exists():
        return "there is no checkpoint yet to go on from"
    command = f"linvit fit --config {shown(run / 'config.yaml')} --ckpt_path {shown(last)}"
    return f"go on from the last checkpoint with\n  {command}"


def shown(path: Path) -> Path:
    """A path relative to the current folder if it lies in it."""
    absolute = path.absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute


def _best(callback: ModelCheckpoint) -> list[str]:
    score = "none" if callback.best_model_score is None else f"{callback.best_model_score:.4f}"
    return [f"best {callback.monitor}  {score}", f"checkpoint      {shown(Path(callback.best_model_path))}"]
