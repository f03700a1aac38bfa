"""A stand-in for W&B's server, as far as `wandb sweep` and `wandb agent` ask it. It hands out one run after another."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

KEY = "a" * 40
ENTITY, PROJECT, SWEEP = "somebody", "lowvram", "abc123"
Values = Mapping[str, Any]


@dataclass
class Server:
    """What it was told, and the runs that an agent gets."""

    runs: Sequence[Values]  # the picked values of each, by key
    address: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # of the sweep that `wandb sweep` has made
    states: list[dict[str, bool]] = field(default_factory=list)  # at each heartbeat: which runs are still running
    unknown: list[str] = field(default_factory=list)  # what was asked and isn't answered
    num_begun: int = 0

    def answer(self, query: str, variables: Values) -> Any:
        operation = re.search(r"(?:query|mutation) (\w+)", query)
        name = operation[1] if operation else ""
        answers = {
            "Viewer": self.viewer,
            "UpsertSweep": self.upsert_sweep,
            "SweepWithRuns": self.sweep_with_runs,
            "CreateAgent": self.create_agent,
            "Heartbeat": self.heartbeat,
        }
        if name not in answers:
            self.unknown.append(name or query)
            return {}
        return answers[name](variables)

    def viewer(self, _: Values) -> Any:
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        about = {"id": "1", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}", "teams": teams}
        return {"viewer": about}

    def upsert_sweep(self, variables: Values) -> Any:
        self.config = yaml.safe_load(variables["config"])
        project = {"id": "2", "name": PROJECT, "entity": {"id": "1", "name": ENTITY}}
        return {"upsertSweep": {"sweep": {"name": SWEEP, "project": project}, "configValidationWarnings": []}}

    def sweep_with_runs(self, _: Values) -> Any:
        about = {"id": "3", "name": SWEEP, "state": "RUNNING", "config": yaml.safe_dump(self.config)}
        return {"project": {"sweep": {**about, "runs": {"edges": []}}}}

    def create_agent(self, _: Values) -> Any:
        return {"createAgent": {"agent": {"id": "4"}}}

    def heartbeat(self, variables: Values) -> Any:
        running = json.loads(variables["runState"])
        self.states.append(running)
        commands: list[Values] = []
        if not any(running.values()):
            commands = [self.next_run() if self.num_begun < len(self.runs) else {"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": "4"}, "commands": json.dumps(commands)}}

    def next_run(self) -> Values:
        self.num_begun += 1
        picked = {key: {"value": value} for key, value in self.runs[self.num_begun - 1].items()}
        return {"type": "run", "run_id": f"picked{self.num_begun}", "program": self.config["program"], "args": picked}


@contextmanager
def wandb_server(runs: Sequence[Values]) -> Iterator[Server]:
    """A server on a free port of this machine, inside the block."""
    server = Server(runs)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer: Any = {}
            if self.path == "/graphql":
                asked = json.loads(body)
                answer = {"data": server.answer(asked["query"], asked.get("variables") or {})}
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.address = f"http://127.0.0.1:{http.server_address[1]}"
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            http.shutdown()
