"""``--explain``: every key can be asked for; what is said is what the reference holds."""

from __future__ import annotations

import json

import pytest

from dsx.config.doctor.reference import KEYS, explain, explain_json
from dsx.errors import ConfigError


def test_every_key_is_explained():
    for path in {key.path for key in KEYS}:
        text = explain(path)
        assert text.startswith(path)
        assert "\n  type " in text
        assert "\n  source " in text
        rows = explain_json(path)["keys"]
        assert rows == json.loads(json.dumps(rows))
        assert {row["path"] for row in rows} == {path}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
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
