"""A hub on this machine: the part of the Hugging Face hub's protocol by which huggingface_hub uploads and downloads."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Repositories in memory.

    Attributes:
        files: Contents by "owner/name/file".
        token: Who has it may write.
        asked: Methods and paths of all requests.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.token = "hf_" + "a1B2c3D4" * 4
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        self.server.asked.append(f"{self.command} {self.path}")

    def answer(self, content: Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path)
        content = self.server.files.get("/".join(found.groups())) if found else None
        if content is None:
            self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        else:
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(content, ETag=etag, X_Repo_Commit=COMMIT)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            made = json.loads(body)
            self.answer({"url": f"{self.server.address}/{made.get('organization', 'me')}/{made['name']}"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/.*", self.path):
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/.*", self.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[f"{found[1]}/{line['value']['path']}"] = base64.b64decode(
                        line["value"]["content"]
                    )
            self.answer({"commitUrl": f"{self.server.address}/{found[1]}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.answer({"error": self.path}, 404)


@contextmanager
def local_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    with Hub() as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()
