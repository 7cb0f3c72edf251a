"""Tied tensors through every format, by stock DeepSpeed's and torch's loaders; targets that are not whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import made
from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Live, Stock
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, execute
from dsx.checkpoint.layouts import TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError

COMMAND = ("reshard",)
PIPELINE = Stock(zero=0, pp=2, dp=1)
UNIVERSAL = Stock(zero=1, pp=2, dp=1, keys=(("checkpoint", {"load_universal": True}),))
CUT = ("--pipeline", "2", "--partition", "3,2")
TIED = ("--tied", "embed=0,4")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A stock pipeline without ZeRO whose head is its embedding, and what its stages held."""
    return stock_checkpoints.save(PIPELINE, tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A plain engine's model with a tied head."""
    return stock_checkpoints.save(Stock(zero=1, dp=1), tmp_path_factory.mktemp("plain"))


def check(lives: list[Live], after: list[Live]) -> None:
    """Every stage holds the states that the same stage held."""
    for one, other in zip(lives, after, strict=True):
        for state in ("exp_avg", "exp_avg_sq", "weight"):
            assert one.states[state].keys() <= other.states[state].keys()
            for name, tensor in one.states[state].items():
                if not name.endswith(".seen") and not (state == "weight" and ".frozen" in name):
                    assert torch.equal(other.states[state][name], tensor), (state, name)


def test_a_pipeline_without_zero_to_stock_deepspeed(dsx, pipeline, tmp_path):
    path, lives, losses = pipeline
    code, _, err = dsx(path, tmp_path / "b" / path.name, "--to", "deepspeed", *CUT, *TIED)
    assert (code, err) == (0, "")
    made_files = {file.name for file in (tmp_path / "b" / path.name).iterdir()}
    assert made_files == {file.name for file in path.glob("*.pt")}
    after, again = stock_checkpoints.resume(PIPELINE, tmp_path / "b" / path.name)
    check(lives, after)
    assert again == losses


def test_a_pipeline_without_zero_to_universal(dsx, pipeline, tmp_path):
    path, lives, _ = pipeline
    code, _, err = dsx(path, tmp_path / "b" / path.name, "--to", "universal", *TIED)
    assert (code, err) == (0, "")
    after, losses = stock_checkpoints.resume(UNIVERSAL, tmp_path / "b" / path.name)
    check(lives, after)
    assert all(torch.isfinite(torch.tensor(losses[0])))


@pytest.mark.parametrize("to", [("deepspeed", *CUT), ("universal",)], ids=["deepspeed", "universal"])
def test_a_tied_module_without_a_key_is_asked_for(dsx, pipeline, tmp_path, to):
    path, *_ = pipeline
    code, _, err = dsx(path, tmp_path / "b", "--to", *to)
    assert code == 2
    assert "layer 0: several stages have it, so that it is a tied module" in err
    assert not list(tmp_path.iterdir())
    # dsx's own format knows it as well, and takes the key later
    assert dsx(path, tmp_path / "own")[0] == 0
    code, _, err = dsx(tmp_path / "own", tmp_path / "b", "--to", *to)
    assert (code, "--tied KEY=0,LAYER" in err) == (2, True)
    assert dsx(tmp_path / "own", tmp_path / "b", "--to", *to, *TIED)[0] == 0
    assert ("tied_modules.embed.weight", "exp_avg") in open_checkpoint(tmp_path / "b").by_key


def test_a_tied_head_through_dcp(dsx, plain, tmp_path):
    """Both names lie on the same bytes; stock DeepSpeed misses none afterwards."""
    import torch.distributed.checkpoint as dcp

    path, lives, losses = plain
    assert dsx(path, tmp_path / "dcp", "--to", "dcp", "--data", 2)[0] == 0
    weights = {name: torch.zeros(11, 6) for name in ("embedding.weight", "head.weight")}
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = lives[0].states["weight"]["embedding.weight"]
    assert all(torch.equal(tensor, expected) for tensor in weights.values())
    target = tmp_path / "b" / path.name
    assert dsx(tmp_path / "dcp", target, "--to", "deepspeed", "--zero", 1, "--data", 1)[0] == 0
    after, again = stock_checkpoints.resume(Stock(zero=1, dp=1), target)
    check(lives, after)
    assert again == losses


def test_the_head_of_a_tied_model_folder_is_a_layer(tmp_path):
    """The last norm is the layer before its head: taken for the head it would be lost in a pipeline."""
    specs = made.layout("qwen2").params
    names = [spec.name for spec in specs]
    facts = {"param_groups": [{"names": names, "lr": 0.1}], "precision": "fp32"}
    source = made.plain(tmp_path / "plain", specs, made.FP32, facts=facts)
    prepare(source, tmp_path / "a", WantedTarget()).run(ConversionOptions(workers=1))
    own = open_checkpoint(tmp_path / "a")
    assert own.facts["stage_bounds"][-1] == 7
    for bounds in ([0, 7], [0, 6]):  # the second is what dsx once wrote
        told = replace(own, facts={**own.facts, "stage_bounds": bounds})
        wanted = WantedTarget(format="deepspeed", degrees=TargetDegrees(pipeline=2, zero=1))
        target = tmp_path / str(bounds[1])
        prepare(told, target, wanted).run(ConversionOptions(workers=1))
        assert (target / "layer_05-model_states.pt").is_file()
        assert ("5.norm.weight", "weight") in open_checkpoint(target).by_key


def without(catalog: Catalog) -> Catalog:
    return replace(catalog, entries=catalog.entries[1:])


def changed(**fields):
    """A catalog that says something else of its first cut tensor."""

    def change(catalog: Catalog) -> Catalog:
        at = next(at for at, entry in enumerate(catalog.entries) if len(entry.shape) == 2)
        entry = catalog.entries[at]
        told = {key: value(entry) if callable(value) else value for key, value in fields.items()}
        rest = catalog.entries
        return replace(catalog, entries=(*rest[:at], replace(entry, **told), *rest[at + 1 :]))

    return change


def moved(entry):
    first, *rest = entry.pieces
    return (replace(first, offset=first.offset - 4), *rest)


@pytest.mark.parametrize("to", ["deepspeed", "universal", "dcp", "dsx", "hf"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without, "the files have it, and it was not to be written"),
        (changed(name="another"), "the files do not have it"),
        (changed(aliases=("head.bias",)), r"its other names: \['head.bias'\] was to be written"),
        (changed(role="buffer"), "its role: buffer was to be written, a loader finds trained"),
        (changed(pieces=moved), "a loader looks for .* elsewhere in"),
    ],
    ids=["more", "name", "tie", "role", "place"],
)
def test_a_target_that_is_not_what_it_should_be_is_no_target(plain, tmp_path, to, change, problem):
    """The files are read again before they get their name; what differs from the plan leaves nothing."""
    path, *_ = plain
    if to == "hf" and ("other names" in problem or "role" in problem):
        return  # whose files say neither
    wanted = WantedTarget(format=to, hf_config={"model_type": "own"} if to == "hf" else None)
    conversion = prepare(open_checkpoint(path), tmp_path / "out", wanted)
    copies = plan(conversion.source, conversion.target.catalog)
    target = replace(conversion.target, catalog=change(conversion.target.catalog))
    if to == "dsx":  # whose manifest is made of the catalog that the writer was given
        target = replace(conversion.target, catalog=target.catalog)
    with pytest.raises(CheckpointError, match=problem):
        execute(conversion.source, target, copies, ConversionOptions(workers=1))
    assert not list(tmp_path.iterdir())
