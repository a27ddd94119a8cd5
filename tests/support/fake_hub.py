"""A model hub on loopback that serves one folder as one repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs


@attrs.define(eq=False)
class HubLog:
    """What clients did. Written by the server's threads under `lock`."""

    downloads: list[str] = attrs.field(factory=list[str])
    requests: int = 0
    cut: str | None = None
    """Name of a file whose transfer breaks off half-way; from then on everything is refused."""
    refuse: bool = False
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.frozen(kw_only=True, eq=False)
class FakeHub:
    endpoint: str
    log: HubLog


@contextmanager
def fake_hub(folder: Path, *, repo: str = "org/name", revisions: tuple[str, ...] = ("main",)) -> Iterator[FakeHub]:
    """Serve `folder` as `repo` until the block ends."""
    log = HubLog()
    commit = hashlib.sha1(str(folder).encode()).hexdigest()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return None

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            with log.lock:
                log.requests += 1
                refuse = log.refuse
            if refuse:
                self.missing("", status=400)
            elif path.startswith(f"/api/models/{repo}/revision/"):
                known = path.rsplit("/", 1)[1] in (*revisions, commit)
                self.answer_info() if known else self.missing("RevisionNotFound")
            elif path == f"/api/models/{repo}":
                self.answer_info()
            elif path.startswith(f"/api/models/{repo}/tree/"):
                self.answer_json([self.entry(file) for file in sorted(folder.iterdir())])
            elif path.startswith(f"/{repo}/resolve/"):
                self.answer_file(folder / path.rsplit("/", 1)[1])
            else:
                self.missing("RepoNotFound")

        def answer_info(self) -> None:
            files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            self.answer_json({"id": repo, "modelId": repo, "sha": commit, "siblings": files, "private": False})

        def entry(self, file: Path) -> dict[str, object]:
            return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": self.etag(file)}

        def etag(self, file: Path) -> str:
            return hashlib.sha1(file.read_bytes()).hexdigest()

        def answer_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def answer_file(self, file: Path) -> None:
            if not file.is_file():
                return self.missing("EntryNotFound")
            body = file.read_bytes()
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.send_header("ETag", f'"{self.etag(file)}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "HEAD":
                return None
            with log.lock:
                log.downloads.append(file.name)
                broken = log.cut == file.name
                log.refuse = log.refuse or broken
            self.wfile.write(body[start : len(body) // 2] if broken else body[start:])
            return None

        def missing(self, code: str, status: int = 404) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="fake-hub")
    thread.start()
    try:
        yield FakeHub(endpoint=f"http://127.0.0.1:{server.server_address[1]}", log=log)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
