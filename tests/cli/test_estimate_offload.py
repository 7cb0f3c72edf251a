"""dsx estimate tells what a rank has on the host."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "configs" / "zero3_offload.json"
COMMAND = ("estimate",)


def test_the_hosts_lines_add_up(dsx):
    code, out, err = dsx(CONFIG, "--gpus", 4, "--format", "json")
    assert (code, err) == (0, "")
    for role in json.loads(out)["pipeline_ranks"]:
        held = {line["name"]: line["bytes"] for line in role["host_lines"]}
        assert sum(held.values()) == role["host_bytes"] > 0
        assert held["moments"] == 2 * held["master weights"]
        names = {line["name"] for phase in role["phases"] for line in phase["lines"]}
        assert not names & {"moments", "master weights", "gradient partitions"}


def test_the_table_says_it_in_a_line(dsx):
    _, out, _ = dsx(CONFIG, "--gpus", 4)
    (line,) = [line for line in out.splitlines() if line.startswith("on the host, a rank: up to ")]
    assert "moments" in line
