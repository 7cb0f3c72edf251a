"""Configs in the shapes that DeepSpeed's users copy, and projects' own: its reader beside the doctor.

The doctor must have nothing against the former.
"""

from __future__ import annotations

import copy
import json

import pytest
from evidence import PROJECTS, VALID

from dsx.config.wording import dotted
from dsx.doctor import examine


def filled(config):
    """``config`` as a Trainer hands it to DeepSpeed, as far as DeepSpeed reads numbers at once."""
    config = copy.deepcopy(config)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.get(key) == "auto":
            config[key] = 1
    config["gradient_accumulation_steps"] = config.get("gradient_accumulation_steps", 1)
    if "train_batch_size" in config and "train_micro_batch_size_per_gpu" in config:
        # One rank here: what is left for accumulation.
        micro = config["train_micro_batch_size_per_gpu"]
        config["gradient_accumulation_steps"] = config["train_batch_size"] // micro
    return config


@pytest.mark.parametrize("name", VALID)
def test_valid(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(json.loads(json.dumps(filled(VALID[name]))))
    report = examine(VALID[name])
    found = [(f.check, f.severity, f.path, f.why) for f in (*report.errors, *report.warnings)]
    assert found == []


@pytest.mark.parametrize("name", PROJECTS)
def test_project(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    arguments, error, expected, config = PROJECTS[name]
    theirs = filled(config)
    if error:
        with pytest.raises(Exception, match=r"\w") as caught:
            DeepSpeedConfig(theirs)
        assert type(caught.value).__name__ == error
    else:
        DeepSpeedConfig(theirs)
    report = examine(json.dumps(config), version="0.19.8", **arguments)
    assert {(f.severity, f.check, dotted(f.path)) for f in report.findings} == expected
    for finding in report.findings:
        assert "comet" not in finding.fix
        # What is dropped for its default is the default.
        if finding.check == "auto" and finding.edits:
            assert finding.edits[0].kind == "remove"
