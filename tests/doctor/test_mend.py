"""What --fix writes is right afterwards, and nothing else has changed; files that are no strict JSON."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.config.document import from_text
from dsx.doctor import examine
from dsx.doctor.mend import mend, settle
from dsx.errors import ConfigError

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_max_lr": 3e-4}},
}
# Ways of getting it wrong, each a change of the config in place.
MISTAKES = {
    "typo": lambda c: c.update({"zero_optimisation": c.pop("zero_optimization")}),
    "inner typo": lambda c: c["scheduler"]["params"].update(
        total_num_step=c["scheduler"]["params"].pop("total_num_steps")
    ),
    "case": lambda c: c.update(BF16={"enabled": True}),
    "dash": lambda c: c.update({"steps-per-print": 5}),
    "level": lambda c: c.update(stage3_max_live_parameters=5),
    "up": lambda c: c["optimizer"].update(gradient_accumulation_steps=2),
    "quoted number": lambda c: c.update(gradient_clipping="0.5"),
    "quoted boolean": lambda c: c.update(wall_clock_breakdown="true"),
    "quoted exponent": lambda c: c["optimizer"]["params"].update(lr="3e-4"),
    "number for boolean": lambda c: c.update(prescale_gradients=0),
    "boolean for block": lambda c: c.update(bf16=True),
    "old block": lambda c: c.update(bfloat16={"enabled": False}),
    "old key": lambda c: c.setdefault("zero_optimization", {}).update(
        stage3_gather_fp16_weights_on_model_save=True
    ),
    "null": lambda c: c.update(gradient_accumulation_steps=1, prescale_gradients=None),
    "removed": lambda c: c.update(elasticity={"enabled": False}, sparse_gradients=True),
    "clipping": lambda c: (
        c.pop("gradient_clipping", None), c["optimizer"]["params"].update(max_grad_norm=1.0)
    ),
    "dead": lambda c: c.update(pipeline={"stages": 2}),
    "peak": lambda c: c["scheduler"]["params"].pop("warmup_max_lr"),
    "other tool": lambda c: c.update(lr_scheduler=c.pop("scheduler")) if "scheduler" in c else None,
    "torch's case": lambda c: c["optimizer"].update(type="sgd"),
    "dead setting": lambda c: c.update(disable_allgather=True),
    "value's case": lambda c: c.update(communication_data_type="BFloat16"),
    "path as key": lambda c: c.update({"zero_optimization.overlap_comm": True}),
    "word for block": lambda c: c.update(tensor_parallel=2),
    "another type's": lambda c: c["optimizer"]["params"].update(momentum=0.9),
    "swapped": lambda c: c["optimizer"]["params"].update(betas=[0.99, 0.9]),
    "spelling of a name": lambda c: c["optimizer"].update(type="Adam_W"),
    "Muon": lambda c: c.update(optimizer={"type": "Muon", "params": {"lr": 0.02}}),
}  # fmt: skip


def key_of(finding):
    return finding.check, finding.path


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(sorted(MISTAKES)), min_size=1, max_size=6, unique=True),
    st.sampled_from([None, 2]),
)
def test_mended_findings_are_gone(names, indent):
    config = json.loads(json.dumps(BASE))
    # "other tool" takes a block away that others look into.
    for name in sorted(names, key="other tool".__eq__):
        MISTAKES[name](config)
    text = json.dumps(config, indent=indent)
    report = examine(text, version="0.19.8")
    mended = settle(text, lambda text: examine(text, version="0.19.8").findings, unsafe=True)
    assert mended.findings
    after = examine(mended.after, version="0.19.8")
    left = {key_of(finding) for finding in after.findings}
    assert not left & {key_of(finding) for finding in mended.findings}
    # Nothing new is wrong, but for what only shows behind a mended key.
    new = {key_of(f) for f in after.errors} - {key_of(f) for f in report.errors}
    renamed = {finding.edits[-1].value for finding in mended.findings if finding.edits[-1].kind == "rename"}
    behind = {"optimizer-untested", "scheduler", "deprecated"}
    assert all(str(path[0]) in renamed or check in behind for check, path in new)
    # A second time there is nothing left to do.
    assert mend(mended.after, after.findings, unsafe=True).findings == ()


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found_and_mended(name):
    config = json.loads(json.dumps(BASE))
    MISTAKES[name](config)
    text = json.dumps(config, indent=2)
    report = examine(text, version="0.19.8")
    assert report.findings
    mended = mend(text, report.findings, unsafe=True)
    assert mended.findings, [(f.check, f.why) for f in report.findings]
    assert "+" in mended.diff("x.json")


def test_comments_and_order_stay():
    text = (
        '{\n  # why\n  "train_batch_size": "8", // eight\n\n  "gradient_clipping": 1.0,\n  "fp_16": {}\n}\n'
    )
    after = mend(text, examine(text).findings, unsafe=True).after
    assert after == text.replace('"8"', "8").replace("fp_16", "fp16")
    assert mend(after, examine(after).findings, unsafe=True).after == after


def test_line_ends_stay():
    lines = [
        "{",
        '  "train_batch_size": 8,',
        '  "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}',
        "}",
    ]
    text = "\r\n".join(lines)
    after = mend(text, examine(text).findings).after
    assert '"gradient_clipping": 1' in after
    assert after.count("\n") == after.count("\r\n") == len(lines)


@pytest.mark.parametrize(
    ("text", "runner", "expected"),
    [
        ('{"train_batch_size": 1, "train_batch_size": 2}', None, ("duplicate-key", "error")),
        ('{"train_batch_size": 1, "bf16": {"a": true, "a": 0}}', None, ("duplicate-key", "error")),
        ('{"train_batch_size": 1,}', None, ("syntax", "note")),
        ("{train_batch_size: 1}", "trainer", ("syntax", "error")),
        ('{"train_batch_size": 1, // one\n}', "trainer", ("syntax", "error")),
        ('\ufeff{"train_batch_size": 1}', "trainer", ("syntax", "error")),
        ('{"bf16": {"enabled": True\n}, "train_batch_size": 1}', None, ("quoted", "warning")),
        ('{"wall_clock_breakdown": False\n, "train_batch_size": 1}', None, ("quoted", "error")),
        ('{"zero_optimization": {"offload_param": {"device": cpu,\n}}, "train_batch_size": 1}', None,
         ("not-a-choice", "error")),
        ('{"train_batch_size": 1_000\n}', None, ("quoted", "error")),
        ('{"gradient_clipping": NaN\n, "train_batch_size": 1}', None, ("wrong-type", "error")),
    ],
)  # fmt: skip
def test_what_is_not_strict_json(text, runner, expected):
    found = {(finding.check, finding.severity) for finding in examine(text, runner=runner).findings}
    assert expected in found
    strict = '{"train_batch_size": 1}'
    assert not {"syntax", "duplicate-key"} & {f.check for f in examine(strict, runner=runner).findings}


def test_whole_numbers_of_the_trainers_reader():
    text = '{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": %s}}}'
    for written, expected in (("1e3", [("scheduler", "params", "warmup_num_steps")]), ("1000", [])):
        errors = examine(text % written, runner="trainer").errors
        assert [finding.path for finding in errors] == expected
        assert not examine(text % written, runner="deepspeed").errors


def test_an_unquoted_word_that_takes_its_line():
    with pytest.raises(ConfigError, match="takes the rest of its line"):
        examine('{"bf16": {"enabled": True}, "train_batch_size": 8}')


def test_who_runs_it_is_guessed_from_auto():
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    rest = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "fp16": {"enabled": "auto"}}
    report = examine(auto | rest)
    assert (report.runner, report.inferred, report.errors, report.warnings) == ("trainer", True, (), ())
    assert [note.check for note in report.notes] == ["auto"]
    assert re.search(r"4 values are \"auto\"", report.notes[0].why)
    alone = examine(auto | rest, runner="deepspeed")
    assert {finding.path[0] for finding in alone.errors} >= {"train_batch_size", "optimizer", "fp16"}
    assert examine({"train_batch_size": 8, "gradient_clipping": "auto"}).runner == "deepspeed"
    assert examine({"train_batch_size": "auto"}).errors
    assert examine({"dsx": {}}).runner == "dsx"
    # A comment, as strict JSON has them.
    assert not examine({"train_batch_size": 8, "_comment": "mine", "gradient_clipping": 1.0}).findings


def test_places_of_findings():
    source = from_text('{\n "train_batch_size": 8,\n "zero_optimization": {\n  "stage": 9}\n}')
    report = examine(source)
    assert [source.place(finding.path) for finding in report.errors] == [(4, 3)]
