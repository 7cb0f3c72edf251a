"""Offline runs through ``wandb sync``, W&B's own reader, to a server that keeps what it is sent."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dsx.config.schema import WandbConfig
from dsx.train.tracking import Tracker
from wandb_file import by_step

PROJECT = {"id": "p", "name": "proj", "entity": {"id": "e", "name": "ent"}}


class Server(ThreadingHTTPServer):
    """As much of W&B's API as a sync of metrics takes (wandb 0.31); history as it keeps it, by line."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history: list[dict[str, Any]] = []
        self.runs: set[str] = set()
        self.config: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that the client drops are no errors."""

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """GraphQL."""
        name = variables.get("name")
        if operation == "RunResumeStatus":
            return {"model": {**PROJECT, "internalId": "x", "bucket": self._bucket(name)}}
        if operation == "UpsertBucket":
            self.runs.add(name)
            self.config = json.loads(variables["config"] or "{}")
            run = {"id": "r", "name": name, "displayName": name, "config": "{}", "historyLineCount": 0}
            return {"upsertBucket": {"bucket": {**run, "sweepName": None, "project": PROJECT}}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/put"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def take(self, files: dict[str, Any]) -> None:
        """Lines of the run's files, each chunk from its own offset on."""
        chunk = files.get("wandb-history.jsonl")
        if chunk is not None:
            self.history[chunk["offset"] :] = [json.loads(line) for line in chunk["content"]]

    def _bucket(self, name: str | None) -> dict[str, Any] | None:
        if name not in self.runs:
            return None
        counts = {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
        texts = dict.fromkeys(("summaryMetrics", "config"), "{}") | {"eventsTail": "[]"}
        tail = json.dumps([json.dumps(row) for row in self.history[-1:]])
        run = {"id": "r", "name": name, "displayName": name, "tags": [], "wandbConfig": '{"t": 1}'}
        return run | counts | texts | {"historyTail": tail}


class Handler(BaseHTTPRequestHandler):
    """JSON in, JSON out."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silence."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            answer = {"data": self.server.answer(asked["operationName"], asked["variables"])}
        elif self.path.endswith("/file_stream"):
            self.server.take(json.loads(body).get("files") or {})
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_POST  # noqa: N815 (named by http.server)


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_run_that_was_resumed_offline_is_one_run_on_the_server(tmp_path: Path) -> None:
    config = WandbConfig(mode="offline", entity="ent", project="proj", artifacts="off")
    folders, run_id = [], None
    for first in (1, 5):
        with Tracker(tmp_path, config, run_config={"x": 1}, first_step=first, run_id=run_id) as tracker:
            for step in range(first, first + 4):
                tracker.log(step, {"train/loss": 1.0 / step, "train/tokens": 10 * step})
            tracker.log(step, {"eval/loss": 2.0 / step})
            run_id = tracker.run_id
            folders.append(tracker.wandb_path)
    with serving() as server:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, folders)],
            env=environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.runs == {run_id}
    assert server.config["x"] == {"value": 1}
    assert [row["_step"] for row in server.history] == [1, 2, 3, 4, 5, 6, 7, 8]
    written = [json.loads(line) for line in tracker.metrics_path.read_text().splitlines()]
    assert [
        {name: value for name, value in row.items() if not name.startswith("_")} for row in server.history
    ] == by_step(written)
