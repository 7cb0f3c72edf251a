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


def test_8_billion_parameters_fit_a_gpu_that_holds_no_two_copies_of_them(dsx):
    """ZeRO-2 flattens them on the host then: 16 GB of weights, 24 GiB of memory."""
    sizes = ("--set", "dsx.data.sequence_length=512", "--set", "dsx.recompute=full")
    offload = ("--set", "zero_optimization.offload_optimizer.device=cpu")
    bucket = ("--set", "zero_optimization.reduce_bucket_size=50000000")
    run = ("--model", "llama-3-8b", "--gpus", 8, "--zero", 2, *sizes, *offload, *bucket)
    code, out, _ = dsx(*run, "--gpu-memory", 24)
    assert code == 0
    assert "24 GiB less 2.96 for context, libraries and gaps: fits" in out
    assert "parameters on their way 14.96" in " ".join(out.split())
    engine = []
    for gib in (24, 80):
        _, out, _ = dsx(*run, "--gpu-memory", gib, "--format", "json")
        phases = json.loads(out)["pipeline_ranks"][0]["phases"]
        engine += [phase["peak_bytes"] for phase in phases if phase["name"] == "engine"]
    assert engine[0] < 20 * 2**30 < 29 * 2**30 < engine[1]
