"""Trains a teacher that has a configuration but no weights yet, before the runs that learn from it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from linvit.errors import UserError
from linvit.io.files import lock
from linvit.io.signals import END_WITH_STDIN
from linvit.runs.folder import newest
from linvit.tasks.teacher import Teacher


def train_teacher(teacher: Teacher) -> bool:
    """Trains a teacher by its configuration, or resumes that training, if it has no weights yet; True if it did."""
    if teacher.source is None or not teacher.untrained:
        return False
    begun = newest(Path(teacher.source), students=False)
    if begun is not None and begun.complete:
        return True  # trained a moment ago, for another stage or variant
    how = f"linvit fit --config {shlex.quote(Path(str(teacher.config)).as_posix())} --resume=auto"
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1))) > 1:
        raise UserError(f"each of several processes would train the teacher. Train it first:\n  {how}")
    try:
        lock(Path(teacher.source))
    except UserError as error:
        raise UserError(f"another process is training the teacher, in '{teacher.source}'. Wait for it") from error
    print(f"the teacher is trained first:\n  {how}", flush=True)
    command, ends = [sys.executable, "-m", *shlex.split(how)], {**os.environ, END_WITH_STDIN: "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=ends) as process:  # it stops when this process does
        code = process.wait()
    if code:
        raise UserError(f"training the teacher failed with exit code {code}:\n  {how}")
    return True
