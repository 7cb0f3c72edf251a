"""A model whose ranks share key/value heads, and the same with fused parameters, read each other's files."""

from __future__ import annotations

import pytest
from test_resharded_runs import begin, go_on

import made
import ranks
from dsx.checkpoint.catalog import model_fact
from dsx.checkpoint.claims import forms_of
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats.deepspeed.module import as_model
from dsx.checkpoint.formats.huggingface.catalog import under_common_names
from dsx.checkpoint.layouts import TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare, fact_differences, only_in, verify
from dsx.checkpoint.reshard import WantedTarget, prepare, under_hf_names
from dsx.config.resolve import resolve
from dsx.models.hf_config import model_spec
from dsx.models.params import param_specs
from often import often
from parity import dsx_run
from parity.dsx_run import Case

CONFIG = made.CONFIGS["llama"] | {"attention_bias": True, "vocab_size": 257}
MODEL = model_spec(CONFIG)
FUSED, APART = (param_specs(MODEL.for_tensor(tensor), pad_multiple=8) for tensor in (2, 4))


def names(catalog) -> set[str]:
    return {entry.name for entry in catalog.entries}


def convert(source, folder, **wanted):
    prepare(source, folder, WantedTarget(**wanted)).run(ConversionOptions(workers=1))
    found = open_checkpoint(folder)
    assert not list(verify(found))
    return found


def same(a, b) -> bool:
    """Whether two checkpoints hold the same bits, by Hugging Face's names if their own differ."""
    one, two = under_common_names(a, b)
    # Stock engines have a master beside a weight in fp32.
    assert {state for _, state in (*only_in(one, two), *only_in(two, one))} <= {"master"}
    return all(found.equal for found in compare(one, two))


def resolved(case):
    config = dsx_run.config(case, None)
    config["dsx"]["model"]["config"] = CONFIG
    config["dsx"]["data"]["sequence_length"] = 8
    return resolve(config, world_size=case.world_size)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A checkpoint of four tensor-parallel ranks, which share two heads."""
    folder = tmp_path_factory.mktemp("apart")
    facts = {
        "step": 4,
        "model": model_fact(MODEL),
        "hf_config": CONFIG,
        "precision": "fp32",
        "mesh": {"tp": 4},
        "param_groups": [{"names": [spec.name for spec in APART], "step": 4, "lr": 0.5}],
    }
    source = made.plain(folder / "plain", APART, made.FP32, facts=facts)
    made_here = convert(source, folder / "native", degrees=TargetDegrees(tensor=4, data=2, zero=1))
    assert names(made_here) == {spec.name for spec in APART}
    return made_here


def test_form_follows_the_degree_and_comes_back(apart, tmp_path):
    to = {tensor: TargetDegrees(tensor=tensor) for tensor in (1, 2, 4)}
    fused = convert(apart, tmp_path / "one", degrees=to[1])
    assert names(fused) == {spec.name for spec in FUSED}
    assert same(apart, fused)
    assert not fact_differences(*under_common_names(apart, fused))
    again = convert(fused, tmp_path / "four", degrees=to[4])
    assert names(again) == names(apart)
    assert same(again, apart)
    assert again.facts["param_groups"][0]["step"] == 4
    assert {spec.name: spec.split for spec in again.specs} == {spec.name: spec.split for spec in APART}
    assert names(convert(again, tmp_path / "two", degrees=to[2])) == names(fused)


@pytest.mark.parametrize("style", ["universal", "dcp", "deepspeed"])
def test_through_other_formats_and_back(apart, tmp_path, style):
    """Stock formats have the fused form, at a tensor-parallel degree of 1; nothing in them says so."""
    there = convert(apart, tmp_path / "there", format=style, precision="fp32")
    assert names(there) == {spec.name for spec in FUSED}
    assert same(as_model(there, FUSED), apart)
    back = convert(there, tmp_path / "back", run=resolved(Case(tp=4)), precision="fp32")
    assert names(back) == names(apart)
    assert same(back, apart)
    assert back.facts["param_groups"][0]["lr"] == 0.5


def test_a_stock_engine_of_ranks_that_share_heads(apart, tmp_path):
    there = convert(apart, tmp_path / "there", format="deepspeed", degrees=TargetDegrees(tensor=4, zero=1))
    assert names(there) == names(apart)
    assert same(as_model(there, APART), apart)
    assert same(as_model(there, FUSED, forms=forms_of(CONFIG)), apart)
    assert names(under_hf_names(there, CONFIG)) == {name for spec in FUSED for name in spec.hf}


def test_transformers_modules_and_back(apart, tmp_path):
    run = resolved(Case(tp=2, implementation="transformers"))
    there = convert(apart, tmp_path / "there", run=run)
    assert names(there) == {spec.name for spec in run.param_specs}
    assert not names(there) & {f"1.attention.qkv.{leaf}" for leaf in ("weight", "q_weight")}
    assert same(there, apart)
    assert not fact_differences(*under_common_names(there, apart)).keys() & {"model", "param_groups"}
    back = convert(there, tmp_path / "back", run=resolved(Case(tp=4)))
    assert names(back) == names(apart)
    assert all(found.equal for found in compare(back, apart))
    # In a stock format nothing says whose modules it is of.
    stock = convert(there, tmp_path / "stock", format="universal", precision="fp32")
    assert names(stock) == names(there)
    again = convert(stock, tmp_path / "again", run=resolved(Case(tp=4)), precision="fp32")
    assert all(found.equal for found in compare(again, apart))


def test_hugging_face_weights(apart, tmp_path):
    there = convert(apart, tmp_path / "hf", format="hf")
    back = convert(there, tmp_path / "back", degrees=TargetDegrees(tensor=4))
    assert names(back) == names(apart)
    one, two = under_common_names(there, apart)
    assert {state for _, state in only_in(two, one)} == {"exp_avg", "exp_avg_sq"}
    assert all(found.equal for found in compare(one, two))
    assert all(found.equal for found in compare(back, apart))


def test_commands(dsx, apart, tmp_path):
    fused, root = tmp_path / "fused", apart.root
    code, out, err = dsx("reshard", root, fused, "--to", "tp=2,dp=1")
    assert (code, err) == (0, "")
    code, out, _ = dsx("diff", root, fused)
    assert code == 0
    count = len([name for spec in FUSED for name in spec.hf]) * len(made.FP32)
    assert out == f"{count} of {count} tensors' states are equal, bit for bit\n"
    code, out, _ = dsx("inspect", root)
    assert (code, "1.attention.qkv.kv_weight" in out) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    often(
        [
            (Case(tp=2, zero=1, accumulation=4), Case(tp=4, zero=2, accumulation=4)),
            (Case(tp=4, zero=3, accumulation=4), Case(tp=2, pp=2, zero=0, accumulation=4)),
            (
                Case(tp=2, zero=1, accumulation=4),
                Case(tp=2, zero=2, accumulation=4, implementation="transformers"),
            ),
            (
                Case(tp=2, pp=2, zero=3, accumulation=4, implementation="transformers"),
                Case(tp=4, zero=1, accumulation=4),
            ),
            (
                Case(family="qwen2", tp=4, zero=0, accumulation=4, bf16=True),
                Case(family="qwen2", tp=2, dp=2, zero=3, accumulation=2, bf16=True),
            ),
        ],
        5,
    ),
    ids=str,
)
def test_a_run_goes_on_in_the_other_form(tmp_path, before, after):
    """The loss of the run that never stopped, and what the engine holds after loading, bit for bit."""
    first, again = tmp_path / "run", tmp_path / "again"
    expected = ranks.run(begin, before.world_size, before, str(first))[0]
    found = ranks.run(go_on, after.world_size, after, str(first), str(again))[0]
    assert found == pytest.approx(expected, rel=2e-2 if before.bf16 else 2e-5)
    one, two = open_checkpoint(first), open_checkpoint(again)
    assert names(one) != names(two)
    assert same(one, two)
    assert not {"model", "param_groups"} & fact_differences(*under_common_names(one, two)).keys()
