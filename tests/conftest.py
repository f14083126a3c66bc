"""Settings of the whole suite."""

import gc
import os
import signal
import tempfile

# One thread per process: `make test` runs a process per core. torch and OpenMP read this when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each deprecated call of jsonargparse warns, not the first alone, and pyproject.toml makes these warnings errors.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "all"

import pytest
import torch
from hypothesis import settings

# A suite that runs in the background ignores Ctrl-C, after nohup also SIGHUP, and so would all that it starts.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), handler)

# The same examples on every run, and no deadline: a busy machine is not a failure.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

# Nothing is downloaded, and what `datasets` prepares is gone afterwards. It reads these when it is imported.
hub = tempfile.TemporaryDirectory(prefix="linvit-hub-", ignore_cleanup_errors=True)
os.environ |= {"HF_HOME": hub.name, "HF_HUB_OFFLINE": "1"}


def pytest_configure(config):
    """CUDA devices are there for `-m gpu` alone: what forks or picks its device by itself is tested on the CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # which CUDA reads when it is first asked for devices
        # torch.manual_seed formats the call stack for each device that may still come: milliseconds, in each test
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None


def pytest_collectstart():
    """What is imported is no garbage, and is not looked at until all is there."""
    gc.disable()


def pytest_collection_finish():
    """What is imported and collected stays: of the whole suite, to look at it for garbage takes half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()
    hub.cleanup()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and pytest -m gpu")


@pytest.fixture(autouse=True)
def seeded():
    """Initial values do not depend on which tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished run of 2 epochs of 10 steps of the tiny quickstart, to be read and left as it is."""
    from tests.cli.runs import train

    return train(tmp_path_factory.mktemp("runs"))
