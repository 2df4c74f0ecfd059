"""A server that speaks the Hugging Face Hub's protocol, as far as downloads of a model need it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_server(models: dict[str, Path]) -> Iterator[str]:
    """Serves these models' folders by their ids, on the loopback. Yields the address for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            """Keep the tests' output quiet."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            found = next((name for name in models if f"/{name}/" in path), None)
            content = None if found is None else _content(found, models[found], path)
            if content is None:
                self._send(b"", {"X-Error-Code": "RepoNotFound"}, body, status=404)
            else:
                tag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
                self._send(content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body)

        def _send(self, content: bytes, headers: dict[str, str], body: bool, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _content(name: str, folder: Path, path: str) -> bytes | None:
    """What the model's revision is, which files it has, or one of them."""
    files = sorted(folder.iterdir())
    if path.startswith(f"/api/models/{name}/revision/"):
        siblings = [{"rfilename": file.name} for file in files]
        return _json({"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "tags": [], "siblings": siblings})
    if path.startswith(f"/api/models/{name}/tree/"):
        return _json(
            [{"type": "file", "oid": COMMIT, "size": file.stat().st_size, "path": file.name} for file in files]
        )
    asked = folder / path.rpartition("/")[2]
    return asked.read_bytes() if asked in files else None


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
