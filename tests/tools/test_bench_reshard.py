"""The benchmark of conversions runs, and what dsx made in it is what DeepSpeed saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "bench_reshard.py"


def test_every_contender_converts_the_same_checkpoint(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, str(TOOL), "--parameters", "1e5", "--width", "64", "--runs", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {name: row[0] for name, row in report["rounds"].items()}
    parameters = 2 * 64 * 256 * 3  # three pairs of layers come closest to 1e5
    assert rows["dsx"]["ideal_write_bytes"] >= rows["dsx"]["ideal_read_bytes"] == 14 * parameters
    assert rows["dsx"]["checks"] > 0
    assert rows["copy"]["output_bytes"] == report["source_bytes"]
    assert rows["ds_to_universal"]["output_bytes"] > 12 * parameters
    assert "dsx " in done.stdout
    assert not list(tmp_path.glob("bench-reshard-*"))
