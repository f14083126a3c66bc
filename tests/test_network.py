"""No verb looks up a name or connects to another machine, unless it reads from the hub."""

import os
import subprocess
import sys

import datasets
import pytest

import linvit.data.sources.splits
from tests.cli.runs import flags, tiny

WATCH = """
import os, sys

def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"):
        place = arguments[0] if event.startswith("socket.get") else arguments[1]
        host = place[0] if isinstance(place, tuple) else place  # a path, of a socket of this machine
        if str(host) not in ("None", "localhost", "127.0.0.1", "::1") and not os.path.exists(host):
            with open(os.environ["LOOKED_UP"], "a") as file:
                print(event, host, file=file)
            raise OSError(f"{event} {host}")

sys.addaudithook(watch)
"""
RUN = """
import sys
from linvit.cli import main

sys.exit(any([main(line.split("\\t")) for line in sys.stdin.read().splitlines()]))
"""


def test_uses_are_not_counted():
    assert linvit.data.sources.splits
    assert not datasets.config.HF_UPDATE_DOWNLOAD_COUNTS


@pytest.mark.slow
def test_nothing_is_looked_up(tmp_path):
    """`datasets` counts its uses at amazonaws.com, unless the hub is offline, as it is in the other tests."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)  # of all processes, those of compare included
    unset = ("HF_", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    found = tmp_path / "looked up"
    env |= {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "HF_HOME": str(tmp_path),
        "LOOKED_UP": str(found),
    }
    short = tiny(trainer__max_epochs=1, trainer__limit_train_batches=2)
    commands = [
        ["list"],
        ["check", "linear", "--quick"],
        ["data", "check", "digits"],
        ["fit", "--config", "quickstart", *short],
        ["compare", "--config", "quickstart", "--seeds", "1", *short, *flags(model__attention="linear,hydra")],
    ]
    lines = "\n".join("\t".join(command) for command in commands)
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=lines, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert not found.exists(), found.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
