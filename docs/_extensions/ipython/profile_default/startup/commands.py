"""Lines of tutorials that begin with `!` end the build if the command fails, and show no progress bars."""

import os
import subprocess
import warnings

from IPython import get_ipython


def run(command: str) -> None:
    """Runs a command line by bash and prints what it prints."""
    text = get_ipython().var_expand(command, depth=1)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    print("\n".join(line for line in done.stdout.decode().rstrip().split("\n") if "\r" not in line))
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {text}")


get_ipython().system = run
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
warnings.filterwarnings("ignore", "IProgress not found")
