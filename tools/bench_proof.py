"""What the proof at start finds and takes, over layouts drawn at random: nothing wrong, and few seconds.

    python tools/bench_proof.py [--draws 200] [--seed 0] [--ranks 1 2 4 8] [--json FILE]
    python tools/bench_proof.py --again FILE --number 17        # one of them once more, with its traceback

Each draw is a config: a tiny model of any family, tensor and pipeline degrees, chunks and a schedule, ZeRO
stage and offload, sequence parallelism, documents kept apart, an adapter, frozen parameters, recompute, ties,
heads. Those for one number of ranks are proved one after another by the same processes, as
`dsx.recipe.build_model` proves a run. What the config itself refuses is counted apart. A difference is a
false alarm, or a wrong result that nobody had seen: either is a bug.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from all_families import tiny  # noqa: E402 (found there)

from dsx.errors import DsxError, LayoutError  # noqa: E402
from dsx.launch.entry import AGREED  # noqa: E402

Json = dict[str, Any]
OWN = ("llama", "mistral", "qwen2", "qwen3")
SCHEDULES = {
    1: ("1f1b", "gpipe", "zb_h1"),
    2: ("interleaved", "interleaved_zb", "zbv", "v_half", "dualpipev"),
}
OWN_SHARE = 0.4
"""Of draws, are of families that dsx has modules of its own for."""

TIMEOUT_SECONDS = 3600.0


def draw(chance: random.Random, ranks: int, families: Sequence[str]) -> Json:
    """A config for ``ranks`` of one of the families; DeepSpeed, dsx or the family may refuse it."""
    tensor = chance.choice([n for n in (1, 2, 4) if ranks % n == 0])
    pipeline = chance.choice([n for n in (1, 2, 4) if ranks // tensor % n == 0])
    chunks = chance.choice((1, 2)) if pipeline > 1 else 1
    family = chance.choice(families)
    own = family in OWN
    heads = {"num_key_value_heads": chance.choice((1, 2, 4))} if chance.random() < 0.5 else {}
    ties = {"tie_word_embeddings": chance.random() < 0.5} if chance.random() < 0.5 else {}
    block: Json = {
        "model": {
            "config": json.loads(tiny.tiny_config(family, **heads, **ties).to_json_string(use_diff=False)),
            "implementation": "dsx" if own and chance.random() < 0.6 else "transformers",
        },
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "chunks": chunks,
            "sequence_parallel": chance.random() < 0.5,
        },
        "data": {"source": "own", "sequence_length": tiny.SEQUENCE},
        "train": {"steps": 2, "output": "unused"},
        "recompute": chance.choice(("none", "none", "full")),
    }
    if pipeline > 1:
        block["schedule"] = {"name": chance.choice(SCHEDULES[chunks])}
    if chance.random() < 0.25:
        block["data"]["documents"] = "apart"
    if chance.random() < 0.2:
        block["adapter"] = {"rank": 4, "type": chance.choice(("lora", "dora"))}
    elif chance.random() < 0.2:
        block["train"]["freeze"] = ["embed"]
    zero: Json = {"stage": chance.randrange(4)}
    if zero["stage"] == 3 and chance.random() < 0.3:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": chance.choice((1, 2)),
        "gradient_accumulation_steps": chance.choice((1, 3, 4, 8)) if pipeline == 1 else 2 * pipeline,
        "gradient_clipping": chance.choice((0.0, 1.0)),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "dsx": block,
    }


def prove_each(rank: int, world_size: int, numbered: list[tuple[int, Json]], into: str) -> None:
    """Prove one config after another in these processes; rank 0 writes each result as it comes."""
    import deepspeed
    import torch.distributed as dist

    from dsx.config.resolve import resolve
    from dsx.launch.processes import seed_generators
    from dsx.parallel.groups import make_groups

    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    for number, content in numbered:
        began, row, alone = time.perf_counter(), {"number": number}, False
        if rank == 0:
            _append(into, {**row, "result": "begun"})
        try:
            config = resolve(content, world_size=world_size)
            groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
            seed_generators(groups, 0)
            row |= _proof(config, groups)
        except DsxError as error:
            row |= {"result": "refused", "said": str(error)}
        except _AloneError as error:
            row, alone = row | error.args[0], True
        except Exception:  # noqa: BLE001 - whatever it is, it is a bug
            row, alone = row | {"result": "traceback", "said": traceback.format_exc()}, True
        if alone:  # the others may still wait for this rank
            _append(into, {**row, "seconds": time.perf_counter() - began})
            raise SystemExit(1)
        if rank == 0:
            _append(into, {**row, "seconds": time.perf_counter() - began})


class _AloneError(Exception):
    """A result of one rank, of which the others do not know."""


def _proof(config: Any, groups: Any) -> Json:
    """What the proof says; a difference is none where a run refuses the model before its proof."""
    from dsx.train.recipe import require_right_layers
    from dsx.verify.small_step import prove

    try:
        found = prove(config, groups, quiet=True)
    except DsxError as error:
        row = {"result": "differs" if isinstance(error, LayoutError) else "refused", "said": str(error)}
        if row["result"] == "differs":
            try:
                require_right_layers(config)
            except DsxError as refusal:
                row = {"result": "refused", "said": str(refusal)}
        if AGREED in getattr(error, "__notes__", ()):
            return row
        raise _AloneError(row) from error
    return {"result": "unproved" if found.why_not else "proved", "said": found.words}


def _append(path: str, row: Json) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def proved(numbered: dict[int, tuple[int, Json]]) -> dict[int, Json]:
    """Every draw's result; one that ends its ranks is a bug too, and the others go on without it."""
    from dsx.launch.local_ranks import RankError, run_ranks

    left: dict[int, list[tuple[int, Json]]] = defaultdict(list)
    for number, (ranks, content) in numbered.items():
        left[ranks].append((number, content))
    found: dict[int, Json] = {}
    for ranks, all_draws in sorted(left.items()):
        while draws := [each for each in all_draws if each[0] not in found]:
            with tempfile.TemporaryDirectory(prefix="bench-proof-") as folder:
                os.environ["HOME"] = folder  # the proofs of other runs stay out of it
                into, said = Path(folder) / "results.jsonl", ""
                try:
                    run_ranks(prove_each, ranks, draws, str(into), timeout_seconds=TIMEOUT_SECONDS)
                except RankError as error:
                    said = str(error)
                rows = [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []
            begun = [row["number"] for row in rows if row["result"] == "begun"]
            found |= {row["number"]: row for row in rows if row["result"] != "begun"}
            if said and begun and begun[-1] not in found:
                found[begun[-1]] = {"number": begun[-1], "result": "traceback", "said": said, "seconds": 0.0}
            elif said and not begun:
                raise SystemExit(said)
            for number in begun:
                print(f"{number:4} {ranks} ranks  {found[number]['result']:9}  {found[number]['said'][:150]}")
    return found


def layout(content: Json) -> str:
    """Tensor and pipeline degrees and the ZeRO stage, in words."""
    degrees = content["dsx"]["parallel"]
    words = [f"{axis} {degrees[axis]}" for axis in ("tensor", "pipeline") if degrees[axis] > 1]
    return " x ".join(words or ["data alone"]) + f", ZeRO-{content['zero_optimization']['stage']}"


def as_text(numbered: dict[int, tuple[int, Json]], found: dict[int, Json]) -> str:
    """The counts, and the seconds of each layout."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for number, row in found.items():
        if row["result"] == "proved":
            ranks, content = numbered[number]
            seconds[ranks, layout(content)].append(row["seconds"])
    counts = Counter(row["result"] for row in found.values())
    lines = [", ".join(f"{count} {result}" for result, count in sorted(counts.items())), ""]
    lines.append("ranks  layout                          proofs  median s  longest s")
    for (ranks, name), took in sorted(seconds.items()):
        lines.append(f"{ranks:5}  {name:32}{len(took):6}{statistics.median(took):10.2f}{max(took):11.2f}")
    return "\n".join(lines)


def main() -> int:
    """Draw, prove, print; 1 if anything differs or ends in a traceback."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--draws", type=int, default=200, metavar="N", help="layouts (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every draw and result there")
    parser.add_argument("--again", type=Path, metavar="FILE", help="take the draws of such a file instead")
    parser.add_argument("--number", type=int, nargs="+", metavar="N", help="these draws alone")
    arguments = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    numbered: dict[int, tuple[int, Json]] = {}
    if arguments.again is not None:
        kept = json.loads(arguments.again.read_text())
        numbered = {row["number"]: (row["ranks"], row["config"]) for row in kept}
    chance = random.Random(arguments.seed)  # noqa: S311 - nothing is hidden by it
    while arguments.again is None and len(numbered) < arguments.draws:
        ranks, own = chance.choice(arguments.ranks), chance.random() < OWN_SHARE
        try:
            numbered[len(numbered)] = ranks, draw(chance, ranks, OWN if own else tiny.all_families())
        except Exception:  # noqa: BLE001, S112 - a family that cannot be made tiny in this way
            continue
    if arguments.number:
        numbered = {number: numbered[number] for number in arguments.number}
    found = proved(numbered)
    if arguments.json is not None:
        rows = [
            {**found[number], "ranks": ranks, "config": content}
            for number, (ranks, content) in numbered.items()
        ]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.number:
        print("\n".join(found[number]["said"] for number in numbered))
    print(as_text(numbered, found))
    return int(any(row["result"] in ("differs", "traceback") for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
