"""Builds the library of null_cuda.c, and says what torch asks of it."""

import ctypes
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src" / "linvit"
SITE = Path(sysconfig.get_path("purelib"))
STUBBED = re.compile(r"__cuda|cuda|cublas|cudnn|cufft|cusolver|cu[A-Z](?!File)")


def missing() -> str | None:
    """What this machine lacks to build the library, or None."""
    if sys.platform != "linux":
        return "the null CUDA device needs Linux"
    for program in ("gcc", "nm"):
        if subprocess.run(["which", program], capture_output=True).returncode:
            return f"the null CUDA device needs {program}"
    if not _headers():
        return "the null CUDA device needs the headers of CUDA: pip install nvidia-cuda-runtime nvidia-cuda-crt"
    return None


def build(folder: Path) -> Path:
    """Compiles the library into a folder: null_cuda.c, and a function that returns 0 for all else that torch calls."""
    libraries = [*SITE.glob("torch/lib/lib*.so"), *SITE.glob("torchvision/*.so")]
    needed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True).stdout
    names = {name.split("@")[0] for name in re.findall(r" U (\S+)", needed)}
    stubs = [f"__attribute__((weak)) int {name}(void) {{ return 0; }}\n" for name in names if STUBBED.match(name)]
    (folder / "stubs.c").write_text("".join(stubs))
    library = folder / "libnull_cuda.so"
    sources = [HERE / "null_cuda.c", folder / "stubs.c"]
    options = ["-w", "-O1", "-shared", "-fPIC", f"-I{_headers()[0]}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, "-o", library, *sources], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """The variables of a process that has the library in place of CUDA."""
    given = {"LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": "0", "PYTHONWARNINGS": "ignore"}
    return os.environ | given


def run(library: Path, calls: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs this Python with the library in place of CUDA; `rehearse.py` adds lines to the file of calls."""
    given = environment(library) | {"CALLS": str(calls)}
    return subprocess.run([sys.executable, *arguments], env=given, capture_output=True, text=True, cwd=HERE.parents[1])


class Server:
    """A process with the library in place of CUDA that has imported linvit, and forks for each program."""

    def __init__(self, library: Path) -> None:
        command, pipe = [sys.executable, "-m", "tests.null_cuda.server"], subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment(library), stdin=pipe, stdout=pipe, text=True, cwd=HERE.parents[1]
        )

    def run(self, calls: Path, module: str, *arguments: str) -> tuple[int, str]:
        """Runs one of the server's modules; returns the exit code and what is printed."""
        output = calls.with_suffix(".txt")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(calls), str(output), module, *arguments]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline()), output.read_text(encoding="utf-8")

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


class Calls:
    """What a block asks of the device.

    Attributes:
        launches: Kernels, calls of libraries that compute, and copies and fills on the device.
        waits: How often the host waited for the device, by the line of linvit (or of the caller) that made it wait.
    """

    def __enter__(self) -> "Calls":
        self.launches, self.waits = 0, Counter[str]()
        self._tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._told)
        _teller().value = ctypes.cast(self._tell, ctypes.c_void_p).value
        return self

    def __exit__(self, *_: object) -> None:
        _teller().value = None

    def _told(self, name: bytes) -> None:
        if name.startswith(b"WAIT"):
            self.waits[_line(sys._getframe())] += 1
        else:
            self.launches += name.startswith((b"_Z", b"cublas", b"cudnn", b"cufft", b"MEMSET", b"D2D"))


@contextmanager
def reading_ones() -> Iterator[None]:
    """Whole numbers that the host reads are 1 and not 0: a detector finds an object in an image."""
    read = ctypes.c_byte.in_dll(_library(), "null_cuda_read")
    read.value = 1
    yield
    read.value = 0


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def _teller() -> ctypes.c_void_p:
    return ctypes.c_void_p.in_dll(_library(), "null_cuda_tell")


def _line(frame: FrameType | None) -> str:
    """The innermost line of linvit, or of these tests."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith((str(SOURCE), str(HERE))) and frame.f_code.co_name != "_told":
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of linvit"


def _headers() -> list[Path]:
    places = [*SITE.glob("nvidia/cu[0-9]*/include"), Path("/usr/local/cuda/include")]
    return [place for place in places if (place / "crt" / "host_defines.h").exists()]
