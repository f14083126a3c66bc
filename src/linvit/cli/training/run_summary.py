"""What a training run says when it has ended: how it went and how to go on."""

from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint


def last_words(keeper: ModelCheckpoint, average: ModelCheckpoint | None, run: Path) -> str:
    """Best score, its checkpoint, and the commands to go on with.

    Args:
        keeper: What kept the best checkpoint.
        average: What kept the best moving average, if there is one.
        run: Folder of the run.
    """
    best = Path(keeper.best_model_path)
    config, last = shown(run / "config.yaml"), shown(best.with_name("last.ckpt"))
    lines = [f"best {keeper.monitor}  {_score(keeper)}", f"checkpoint      {shown(best)}"]
    if average is not None and average.best_model_path:
        lines += [
            f"best {average.monitor}  {_score(average)}",
            f"checkpoint      {shown(Path(average.best_model_path))}",
        ]
    lines += [
        f"test it         linvit test --config {config} --ckpt_path {shown(best)}",
        f"go on training  linvit fit --config {config} --ckpt_path {last} --trainer.max_epochs=MORE",
        f"look at it      tensorboard --logdir {shown(run.parent)}",
    ]
    return "\n" + "".join(f"  {line}\n" for line in lines)


def interrupted(run: Path, step: int) -> str:
    """What a run says that was told to end (SIGTERM) at a step: how to go on with it."""
    last = run / "checkpoints" / "last.ckpt"
    if not last.exists():
        return f"ended by SIGTERM at step {step}, before there was a checkpoint"
    command = f"linvit fit --config {shown(run / 'config.yaml')} --ckpt_path {shown(last)}"
    return f"ended by SIGTERM at step {step}; go on from the last checkpoint with\n  {command}"


def shown(path: Path) -> Path:
    """A path relative to the current folder if it lies in it."""
    absolute = path.absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute


def _score(keeper: ModelCheckpoint) -> str:
    return "none" if keeper.best_model_score is None else f"{keeper.best_model_score:.4f}"
