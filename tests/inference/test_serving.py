"""The programs of docs/guides/export.md, with a file of `linvit export`, and without linvit."""

import io
import json
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image, ImageOps

from tests.cli.runs import linvit

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "export.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
REQUESTS, BAD_EVERY = 1000, 10


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """A folder with the file that the page speaks of."""
    folder = tmp_path_factory.mktemp("served")
    done = linvit("export", run.folder, "model.onnx", "--with_preprocessing", "--skip_latency", cwd=folder)
    assert done.code == 0, done.err
    return folder


def files():
    """Images of unequal sizes, modes and formats, and what is none."""
    values, noise = np.random.default_rng(0), []
    for number in range(REQUESTS):
        height, width = values.integers(1, 150, 2)
        image = Image.fromarray(values.integers(0, 256, (height, width, 3), dtype=np.uint8))
        mode = ("RGB", "L", "RGBA")[number % 3]
        out = io.BytesIO()
        image.convert(mode).save(out, "JPEG" if mode == "L" else "PNG")
        noise.append(out.getvalue())
    huge = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(huge, "PNG")
    bad = [b"", b"no image", noise[0][:60], huge.getvalue()]
    return [bad[i // BAD_EVERY % len(bad)] if i % BAD_EVERY == 0 else file for i, file in enumerate(noise)]


@pytest.mark.slow
def test_a_thousand_requests_get_their_answers(exported):
    """Bad files among them are refused, and each image gets the score of its own logits."""
    (program,) = (each for each in PROGRAMS if each.startswith("# serve.py"))
    (exported / "serve.py").write_text(program, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "serve.py", str(port)], cwd=exported)
    try:
        sent = files()
        wait_for(port, server)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda file: post(port, file), sent))
    finally:
        server.kill()
        server.wait()
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    for number, (file, (status, content)) in enumerate(zip(sent, answers, strict=True)):
        if number % BAD_EVERY == 0:
            assert (status, *content) == (400, "error")
            continue
        image = ImageOps.fit(Image.open(io.BytesIO(file)).convert("RGB"), (32, 32), Image.Resampling.BICUBIC)
        (logits,) = session.run(None, {"images": np.moveaxis(np.asarray(image), -1, 0)[None]})
        scores = np.exp(logits[0]) / np.exp(logits[0]).sum()
        assert status == 200
        assert content == {"class": str(scores.argmax()), "score": pytest.approx(scores.max(), rel=1e-4)}


def wait_for(port, server):
    for _ in range(600):
        assert server.poll() is None
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


def post(port, file):
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/", file)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.slow
def test_the_file_runs_in_onnxruntime_as_the_page_says(exported, monkeypatch, capsys):
    monkeypatch.chdir(exported)
    (program,) = (each for each in PROGRAMS if "import json, numpy, onnxruntime" in each)
    exec(compile(program, "docs/guides/export.md", "exec"), {})
    assert re.fullmatch(r"\['\d'(, '\d'){4}\]\n", capsys.readouterr().out)
