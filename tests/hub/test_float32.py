"""What a family keeps in fp32 stays so in a run of bf16, as transformers' from_pretrained has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import dsx as dsx_library
import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare, only_in
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.hub.read import hub_model
from float32_families import FAMILIES
from often import often

ROWS, MICRO_BATCHES, STEPS, CLIPPING = 2, 2, 3, 0.5
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def _folder(path: Path, family: str) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    model.float().save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_stays_in_float32_is_what_from_pretrained_keeps(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(_folder(tmp_path, family), dtype=dtype)
    wanted = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    known = hub_model(model.config.to_dict())
    low = str(dtype).removeprefix("torch.")
    assert {spec.in_module for spec in known.params if spec.dtype_in(low) == "float32"} == wanted
    model.save_pretrained(tmp_path / "theirs")  # and what `dsx reshard --precision` keeps
    precision = {"bfloat16": "bf16", "float16": "fp16"}[low]
    target = WantedTarget(format="hf", precision=precision)
    prepare(open_checkpoint(tmp_path), tmp_path / "ours", target).run(ConversionOptions())
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())


def _batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    made = [torch.randint(1, 96, (2 * ROWS, 17), generator=generator) for _ in range(MICRO_BATCHES)]
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in made]


def _alone(_rank: int, _world_size: int, folder: Path, sums_in_fp32: bool) -> tuple[list[float], int]:
    """bf16 as from_pretrained gives it, with AdamW over masters in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    held = dict(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in held.items()}
    optimizer, losses = torch.optim.AdamW(masters.values(), **ADAMW), []
    for step in range(STEPS):
        sums, total = (
            {
                name: torch.zeros_like(p, dtype=torch.float32 if sums_in_fp32 else None)
                for name, p in held.items()
            },
            0.0,
        )
        for inputs, labels in _batches(step):
            for at in range(0, 2 * ROWS, ROWS):
                logits = model(input_ids=inputs[at : at + ROWS], use_cache=False).logits.float()
                loss = F.cross_entropy(logits.flatten(0, 1), labels[at : at + ROWS].flatten())
                (loss / (2 * MICRO_BATCHES)).backward()
                total += loss.item() / (2 * MICRO_BATCHES)
                for name, p in held.items():
                    if p.grad is not None:
                        sums[name] += p.grad
                    p.grad = None
        for name, master in masters.items():
            master.grad = sums[name].float()
        torch.nn.utils.clip_grad_norm_(masters.values(), CLIPPING)
        optimizer.step()
        with torch.no_grad():
            for name, p in held.items():
                p.copy_(masters[name])
        losses.append(total)
    return losses, len(masters)


def _rows(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of all replicas."""
    return [
        (inputs[at : at + ROWS], labels[at : at + ROWS])
        for inputs, labels in _batches(step)
        for at in range(0, 2 * ROWS, ROWS)
    ]


def _config(folder: Path, out: Path, zero: int, parallel: dict[str, int], *, sums: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES * (1 if not parallel else 2),
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if sums else {}),
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "dsx": {
            "model": {"path": str(folder), "implementation": "transformers"},
            "parallel": parallel,
            "data": {"source": "own", "sequence_length": 16},
            "train": {"steps": STEPS, "output": str(out / "run")},
        },
    }


def _by_dsx(
    _rank: int, world_size: int, folder: Path, out: Path, zero: int, parallel: dict[str, int], sums: bool
) -> tuple[list[float], dict[str, tuple[torch.dtype, torch.dtype]]]:
    from dsx.checkpoint.run.export import export_hf
    from dsx.checkpoint.run.names import spec_of
    from dsx.engine.zero.master_shards import master_shards
    from dsx.parallel.groups import make_groups

    settings = _config(folder, out, zero, parallel, sums=sums)
    config = dsx_library.load_config(settings, world_size=world_size)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    engine = dsx_library.initialize(model=dsx_library.recipe.build_model(config, groups), config=config)[0]
    losses = []
    for step in range(STEPS):
        rows = _rows(step)
        own = rows if parallel else rows[groups.replica :: 2]
        losses.append(float(engine.train_batch(iter(own))))
    export_hf(engine, out / "hf")
    masters = {s.parameter: m.master.dtype for m in master_shards(engine) for s in m.spans}
    held = {
        spec_of(p).in_module: (p.dtype, masters.get(p, torch.float32)) for p in engine.module.parameters()
    }
    return losses, held


@pytest.mark.parametrize(
    ("family", "zero", "parallel"),
    often(
        [
            ("ernie4_5_moe", 1, {"pipeline": 2}),
            ("olmo_hybrid", 0, {"pipeline": 2}),
            ("deepseek_v3", 1, {"tensor": 2}),
            ("ernie4_5_moe", 2, {}),
            ("ernie4_5_moe", 3, {}),
            ("olmo_hybrid", 3, {"pipeline": 2}),
            ("olmo_hybrid", 2, {}),
            ("llama", 1, {"pipeline": 2}),
            ("ernie4_5_moe", 0, {"tensor": 2}),
        ],
        every=5,
    ),
)
def test_training_in_bf16_equals_transformers_over_fp32_masters(
    family: str, zero: int, parallel: dict[str, int], tmp_path: Path
) -> None:
    folder, sums = _folder(tmp_path / "model", family), zero in (1, 2)
    losses, _ = ranks.run(_alone, 1, folder, sums)[0]
    found = ranks.run(_by_dsx, 2, folder, tmp_path, zero, parallel, sums)
    # Two orders of the same sums in bf16, which has 8 bits.
    torch.testing.assert_close(found[0][0], losses, rtol=2e-3, atol=0)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    wanted = {name: p.dtype for name, p in plain.named_parameters()}
    for _, held in found:
        assert {name: own for name, (own, _) in held.items()} == {name: wanted[name] for name in held}
        assert {master for _, master in held.values()} == {torch.float32}
    plain.save_pretrained(tmp_path / "theirs")
    assert _dtypes(tmp_path / "hf") == _dtypes(tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert {name: p.dtype for name, p in again.named_parameters()} == wanted


def _dtypes(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def _saved(
    _rank: int, world_size: int, config: dict[str, Any], out: Path, source: Path | None
) -> list[float]:
    """A checkpoint, of a run that goes on from ``source`` if any, and the losses of two steps after it."""
    from dsx.parallel.groups import make_groups

    run = dsx_library.load_config(config, world_size=world_size)
    groups = make_groups(run.mesh, sequence_parallel=run.dsx.parallel.sequence_parallel)
    engine = dsx_library.initialize(model=dsx_library.recipe.build_model(run, groups), config=run)[0]

    def trained(steps: range) -> list[float]:
        rows = [_rows(step)[groups.replica :: run.mesh.num_replicas] for step in steps]
        return [float(engine.train_batch(iter(its))) for its in rows]

    if source is None:
        trained(range(2))
    else:
        engine.load_checkpoint(str(source))
    engine.save_checkpoint(str(out), tag="saved")
    return trained(range(2, 4))


@pytest.mark.parametrize("style", often(["deepspeed", "native", "dcp", "universal"], every=4))
def test_checkpoints_keep_every_bit_of_what_stays_in_float32(dsx: Any, tmp_path: Path, style: str) -> None:
    folder = _folder(tmp_path / "model", "ernie4_5_moe")
    before = _config(folder, tmp_path, 1, {"tensor": 2}, sums=False)
    after = _config(folder, tmp_path, 3, {}, sums=False)
    losses = ranks.run(_saved, 2, before, tmp_path / "one", None)[0]
    saved, source = tmp_path / "one" / "saved", tmp_path / "one" / "saved"
    (tmp_path / "after.json").write_text(json.dumps(after))
    if style != "native":
        source = tmp_path / "there"
        assert dsx("reshard", saved, source, "--to", style, "--names", "hf")[0] == 0
    back = dsx("reshard", source, tmp_path / "back" / "saved", tmp_path / "after.json", "--gpus", 2)
    assert (back[0], back[2]) == (0, "")
    again = ranks.run(_saved, 2, after, tmp_path / "two", tmp_path / "back")[0]
    torch.testing.assert_close(again, losses, rtol=2e-3, atol=0)
    one = open_checkpoint(saved)
    for folder in (tmp_path / "back", tmp_path / "two"):
        two = open_checkpoint(folder / "saved")
        assert not only_in(one, two)
        assert all(each.equal for each in compare(one, two))  # the dtypes, too
    assert {e.dtype for e in one.entries if e.name.endswith("mlp.gate.weight")} == {"float32"}
