"""dsx's runs go on under stock DeepSpeed's PipelineEngine, in a pipeline with tensor parallelism too."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

import ranks
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare
from often import often
from parity import dsx_run
from parity.dsx_run import Case

COMMAND = ("reshard",)
STEPS = 10
# DeepSpeed counts what is tied into its norm as often as it is there.
EXTRA = (("gradient_clipping", 0.0),)


def begin(rank: int, world_size: int, case: Case, folder: str) -> list[float]:
    """Two steps, a save, and the rest of the run without any interruption."""
    engine, _ = dsx_run.build(case, None)
    dsx_run.losses_of(engine, case, range(2))
    engine.save_checkpoint(folder, tag="saved")
    return dsx_run.losses_of(engine, case, range(2, 2 + STEPS))


def stock_engine(case: Case, method: str, universal: bool):
    """dsx's layers in DeepSpeed's PipelineModule, under DeepSpeed's engine."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    import dsx
    from dsx.models.families import layers, loss
    from dsx.nn.parallel import TensorParallel

    deepspeed.init_distributed(dist_backend="gloo")
    resolved = dsx.load_config(dsx_run.config(case, None), world_size=case.world_size)
    rank, world = dist.get_rank(), dist.get_world_size()
    teams = [dist.new_group(list(range(at, at + case.tp))) for at in range(0, world, case.tp)]
    tp = TensorParallel(size=case.tp, rank=rank % case.tp, group=teams[rank // case.tp])
    module = PipelineModule(
        layers=layers(resolved.model, tp, dtype=torch.float32, pad_multiple=8, seed=5),
        topology=PipeModelDataParallelTopology(num_pp=case.pp, num_mp=case.tp, num_dp=case.dp),
        loss_fn=loss(resolved.model, tp),
        partition_method=method,
        activation_checkpoint_interval=0,
    )
    config = dsx_run.config(case, None)
    del config["dsx"]
    if universal:
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=module, config=config)
    return engine


def go_on(rank: int, world_size: int, case: Case, method: str, universal: bool, folder: str) -> list[float]:
    engine = stock_engine(case, method, universal)
    path, _ = engine.load_checkpoint(folder, tag="saved")
    assert path is not None
    assert engine.global_steps == 2
    dp_rank = engine.grid.get_data_parallel_rank()
    steps = range(2, 2 + STEPS)
    return [float(engine.train_batch(dsx_run.batches(case, step, dp_rank))) for step in steps]


def case_of(family: str) -> Case:
    """The run that goes on."""
    return Case(family=family, tp=2, pp=2, chunks=2, zero=3, accumulation=4, extra=EXTRA)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder and further losses of a run, by family; each is made once."""
    made = {}

    def run_of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            case = case_of(family)
            made[family] = folder, ranks.run(begin, case.world_size, case, str(folder))[0]
        return made[family]

    return run_of


@pytest.mark.parametrize(
    ("family", "after", "partition", "universal"),
    often(
        [
            ("llama", {"tp": 2, "pp": 2, "zero": 1}, "parameters", False),
            ("gpt2", {"pp": 2, "dp": 2, "zero": 1}, "uniform", False),
            ("gpt2", {"pp": 2, "dp": 2, "zero": 1}, "parameters", True),
        ],
        3,
    ),
)
def test_a_run_goes_on_in_a_stock_pipeline(dsx, runs, tmp_path, family, after, partition, universal):
    run, expected = runs(family)
    sums = 4 // after.get("dp", 1)
    case = Case(family=family, accumulation=sums, sequence_parallel=False, extra=EXTRA, **after)
    other = tmp_path / "other" / "saved"
    to = ["--to", "universal" if universal else "deepspeed", "--pipeline", case.pp, "--data", case.dp]
    code, out, err = dsx(run, other, *to, "--tensor", case.tp, "--zero", 1, "--partition", partition)
    assert (code, err) == (0, "")
    assert "The PipelineModule that loads it has" in out
    arguments = (case, partition, universal, str(tmp_path / "other"))
    found = ranks.run(go_on, case.world_size, *arguments)[0]
    assert found == pytest.approx(expected, rel=2e-5)
    # What stock DeepSpeed was given is what the run had, without loss.
    again, config = tmp_path / "back", tmp_path / "config.json"
    config.write_text(json.dumps(dsx_run.config(case_of(family), None)))
    code, _, err = dsx(other, again, config, "--gpus", 4)
    assert (code, err) == (0, "")
    same = list(compare(open_checkpoint(run), open_checkpoint(again)))
    assert {one.state for one in same} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(one.equal for one in same)
