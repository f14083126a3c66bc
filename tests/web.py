"""A web server on this machine, which counts what it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves the files of a folder; gives the address, and a list that every request is added to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
    server.asked = []  # type: ignore[attr-defined]
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
