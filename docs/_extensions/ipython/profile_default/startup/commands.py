"""Lines of tutorials that begin with `!` end the build if the command fails, and show no progress bars."""

import re
import subprocess

from IPython import get_ipython


def run(command: str) -> None:
    """Runs a command line by bash and prints what it prints."""
    text = get_ipython().var_expand(command, depth=1)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print("\n".join(re.sub(r".*\r", "", line) for line in done.stdout.rstrip().split("\n")))
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {text}")


get_ipython().system = run
