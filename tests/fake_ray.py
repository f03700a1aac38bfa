"""A Jobs API as that of a Ray cluster, which keeps a list of jobs and runs none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Said = tuple[int, str] | None  # a status and a text; None: the connection breaks off


@dataclass
class FakeRay:
    """One that answers, as long as it isn't told to answer something else.

    Attributes:
        jobs: by their submission_id, as the API shows them.
        says: what it answers instead, by "METHOD /path".
        takes: whether it makes a job though it answers something else.
        tokens: what the requests had as Authorization.
    """

    address: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    says: dict[str, Said] = field(default_factory=dict)
    takes: bool = False
    tokens: list[str | None] = field(default_factory=list)

    def end(self, name: str, status: str, message: str = "Job failed.") -> None:
        self.jobs[name] |= {"status": status, "message": message}

    def answer(self, method: str, path: str, body: bytes) -> Said:
        said = self.says.get(f"{method} {path}", self.says.get(method, (0, "")))
        is_usual = said == (0, "")
        if method == "POST" and (is_usual or self.takes):
            asked = json.loads(body)
            self.jobs[asked["submission_id"]] = {**asked, "status": "PENDING", "message": "Job has not started yet."}
        return self.usual(method, path, body) if is_usual else said

    def usual(self, method: str, path: str, body: bytes) -> Said:
        if path == "/api/version":
            return 200, json.dumps({"version": "4", "ray_version": "2.60.0"})
        if method == "POST":
            name = json.loads(body)["submission_id"]
            return 200, json.dumps({"job_id": name, "submission_id": name})
        if path == "/api/jobs/":
            driver = {"type": "DRIVER", "submission_id": None, "status": "RUNNING"}
            return 200, json.dumps([*self.jobs.values(), driver])
        name = path.removeprefix("/api/jobs/")
        return (200, json.dumps(self.jobs[name])) if name in self.jobs else (404, f"Job {name} does not exist")


@contextmanager
def fake_ray() -> Iterator[FakeRay]:
    made = FakeRay()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.tokens.append(self.headers.get("Authorization"))
            said = made.answer(self.command, self.path, body)
            if said is None:
                self.close_connection = True
                return
            self.send_response(said[0])
            if 300 <= said[0] < 400:
                self.send_header("Location", said[1])
            self.send_header("Content-Length", str(len(said[1].encode())))
            self.end_headers()
            self.wfile.write(said[1].encode())

        do_GET = do_POST = respond

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
