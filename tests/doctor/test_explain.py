"""``--explain``: every key can be asked for; what is said is what the reference holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsx.config.keys import reference
from dsx.doctor.explain import documented, explain, explain_json
from dsx.errors import ConfigError


def test_every_key_is_explained():
    for path in {key.path for key in reference().rows}:
        text = explain(path)
        assert text.startswith(path)
        assert "\n  type " in text
        assert "\n  source " in text
        rows = explain_json(path)["keys"]
        assert rows == json.loads(json.dumps(rows))
        assert {row["path"] for row in rows} == {path}


def test_every_key_of_the_documentation_is_explained():
    """documented_keys.txt: every key that DeepSpeed's page of August 2026 (config-json.md) names."""
    for name in (Path(__file__).parent / "documented_keys.txt").read_text().split():
        try:
            text = explain(name)
        except ConfigError as error:
            text = error.what  # of several blocks: each by its path
        assert "source  " in text or "keys end so" in text, name


def test_what_is_explained_as_gone_is_refused():
    from deepspeed.runtime.config import DeepSpeedConfig

    for key in documented():
        assert f"refused{f' since {key.until}' * bool(key.until)}" in explain(key.path), key.path
        if key.variant:
            continue  # the optimizer itself is refused: test_evidence_engines.py, "OneBitAdam"
        block, _, word = key.path.partition(".")
        with pytest.raises(Exception, match=r"removed|Extra inputs"):
            DeepSpeedConfig({"train_batch_size": 1, block: {word: {}}})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("grad_hooks", ["zero_optimization.grad_hooks", "refused"]),
        ("curriculum_type", ["curriculum_learning.curriculum_type", "refused since 0.19.8"]),
        ("layer_reduction", ["compression_training.layer_reduction", "refused since 0.19.7"]),
        ("min_difficulty", ["data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"]),
        ("OneBitAdam", ["optimizer.params.freeze_step", "refused since 0.19.7"]),
        ("gradient_clipping", ["default   1.0", "a number of at least 0"]),
        (
            "prefetch_bucket_size",
            ["zero_optimization.stage3_prefetch_bucket_size", "stage is below 3", "50000000"],
        ),
        ("offload_optimizer", ["keys      device, nvme_path", "are an error", "or null"]),
        ("elasticity", ["refused since 0.19.8", "use train_batch_size"]),
        ("thread_count", ["ignored since 0.16.4", "use aio.intra_op_parallelism"]),
        ("cpu_offload", ["deprecated", "use zero_optimization.offload_optimizer"]),
        ("optimizer.params.lr", ["0.001 (adam, adamw,", "0.01 (adagrad,", "Trainer"]),
        ("WarmupCosineLR", ["scheduler.params.total_num_steps", "none: it is needed", "since 0.12.3"]),
        ("warmup_max_lr", ["null (warmuplr)", "0.001 (warmupdecaylr)"]),
        ("allgather_partitions", ["read by nothing"]),
        ("zenflow.update_interval", ['"auto"    a value of its own']),
        ("tag_validation", ['"WARN", "IGNORE" or "FAIL", in any case']),
    ],
)
def test_what_is_said(asked, words):
    text = explain(asked)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("device", ["2 keys end so", "zero_optimization.offload_param.device"]),
        ("gradient_cliping", ["knows no such key", "write gradient_clipping, if that is meant"]),
        ("qwertyuiop", ["knows no such key", "dsx check --help"]),
        ("", ["knows no such key"]),
    ],
)
def test_what_is_refused(asked, words):
    with pytest.raises(ConfigError) as caught:
        explain(asked)
    assert [word for word in words if word not in str(caught.value)] == []
    with pytest.raises(ConfigError):
        explain_json(asked)
