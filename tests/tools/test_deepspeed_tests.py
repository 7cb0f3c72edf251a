"""What tools/deepspeed_tests.py changes in DeepSpeed's tests: two kinds of lines where pipelines are made."""

from __future__ import annotations

from pathlib import Path

import deepspeed_tests
import pytest

BEFORE = """import deepspeed
from deepspeed.runtime.pipe.module import PipelineModule, LayerSpec

def test():
    model = PipelineModule(layers=[LayerSpec(int)], num_stages=2)
    engine, _, _, _ = deepspeed.initialize(config={}, model=model)
"""
AFTER = """import deepspeed
from dsx import PipelineModule
from deepspeed.pipe import LayerSpec

def test():
    model = PipelineModule(layers=[LayerSpec(int)], num_stages=2)
    engine, _, _, _ = __import__("dsx").initialize(config={}, model=model)
"""
OTHER = "import deepspeed\n\nengine, *_ = deepspeed.initialize(model=None)\n"


def test_only_two_lines_change(tmp_path: Path) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit/test_pipe.py").write_text(BEFORE)
    (tmp_path / "unit/test_zero.py").write_text(OTHER)
    assert deepspeed_tests.change_two_lines(tmp_path) == 2
    assert (tmp_path / "unit/test_pipe.py").read_text() == AFTER
    assert (tmp_path / "unit/test_zero.py").read_text() == OTHER


def test_a_session_that_ends_early_is_no_count(tmp_path: Path) -> None:
    """DeepSpeed's tests end it where one hangs."""
    for part in deepspeed_tests.PARTS:
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    test = tmp_path / deepspeed_tests.PARTS[0] / "test_it.py"
    test.write_text("import pytest\ndef test_one(): pass\ndef test_two(): assert 0\n")
    found = deepspeed_tests.run(tmp_path, "", bare=True)
    assert sorted(outcome[0] for outcome in found.values()) == ["failed", "passed"]
    test.write_text(f"{test.read_text()}def test_three(): pytest.exit('Test hanged', returncode=1)\n")
    with pytest.raises(SystemExit, match="Test hanged"):
        deepspeed_tests.run(tmp_path, "", bare=True)
