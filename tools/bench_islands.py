"""Islands (dsx.outer) beside synchronous training: held-out losses, bytes, tokens/s over slow links.

    python tools/bench_islands.py losses --islands 2,4 --every 10,50 --wires fp32,int8
    python tools/bench_islands.py links --mbit 100,1000 --delay-ms 0,25
    python tools/bench_islands.py links --mbit 100 --systems dsx-zero1 islands:every=10,wire=int8 ddp

losses: recipes/gpt_3d.py with configs/zero1.json on the text that is embedded in Python's installation, as
islands and as one job whose batch is as large as those of all islands together, so that step by step both
read the same tokens. As in DiLoCo's own experiments (arXiv:2311.08105, section 3: 24,000 of 88,000 steps),
all go on from the first quarter of the one job's steps; --before 0 lets islands begin with fresh weights.
Printed is the held-out loss of each, and how far islands are from the one job.

links: two machines, network namespaces with a link of limited rate between them, train a Llama on the same
number of tokens a step: dsx with an island on each, dsx's ZeRO-1 over both, and transformers' model under
torch's DDP (plain; with the PowerSGD hook, ddp:rank=4), in a plain DiLoCo loop over gloo, and, with --torchft
FOLDER, under torchft's DiLoCo (pip install --no-deps --target FOLDER torchft-nightly). Printed are tokens/s,
the bytes that an end of the link has sent for an inner step as the kernel counts them, headers included, and
ratios to ZeRO-1.

Both need root, for network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from islands_bench.links import Pace, missing
from islands_bench.losses import Outer, Training, begin, held_out_loss
from islands_bench.speed import Load, System, measured

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    "8M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "vocab_size": 4096},
}
BASE = "dsx-zero1"
_OF_ROUNDS = "seconds", "hidden"
USUAL = (
    BASE,
    "ddp",
    "ddp:rank=4",
    *(f"islands:every={every},wire={wire}" for every in (10, 50) for wire in ("fp32", "bf16", "int8")),
    "islands:every=50,wire=fp32,delay=25",
    "diloco:every=10",
    "diloco:every=50",
)


def main() -> int:
    """Run what the command line asks for; 0 if all went well."""
    arguments = _arguments()
    if lacking := missing():
        print(f"this {lacking}", file=sys.stderr)
        return 1
    print(f"load before {os.getloadavg()[0]:.1f}, {' '.join(sys.argv[1:])}", flush=True)
    figures = arguments.part(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def losses(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Held-out losses, a table row at a time."""
    training = Training(
        steps=arguments.steps,
        start=None,
        batch=arguments.batch,
        length=arguments.sequence_length,
        eval_tokens=arguments.eval_tokens,
        model=arguments.model,
    )
    before = arguments.steps // 4 if arguments.before is None else arguments.before
    with tempfile.TemporaryDirectory() as folder:
        if before:
            training = replace(training, start=begin(training, before, Path(folder)))
        return _losses(arguments, training)


def _losses(arguments: argparse.Namespace, training: Training) -> list[dict[str, Any]]:
    print("| islands | every | wire | outer lr, momentum | held-out loss | from one job | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    outers = [
        Outer(islands=islands, every=every, wire=wire, lr=lr, momentum=momentum)
        for islands in arguments.islands
        for every in arguments.every
        for wire in arguments.wires
        for lr, momentum in arguments.outer
    ]
    found: list[dict[str, Any]] = []
    for outer in [None, *outers]:
        with tempfile.TemporaryDirectory() as folder:
            row = held_out_loss(training, outer, Path(folder))
        row["from_one_job"] = row["loss"] / (found[0] if found else row)["loss"] - 1
        how = ("one job", "", "", "")
        if outer is not None:
            how = (f"{outer.islands}", f"{outer.every}", outer.wire, f"{outer.lr:g}, {outer.momentum:g}")
        figures = f"{row['loss']:.4f} | {row['from_one_job']:+.2%} | {row['seconds']:.0f}"
        print(f"| {' | '.join(how)} | {figures} |", flush=True)
        found.append(row | {"outer": None if outer is None else asdict(outer)})
    return found


def links(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens/s and bytes of each system over each link, a table row at a time."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    sizes = SIZES[arguments.size] | {"max_position_embeddings": arguments.sequence_length}
    load = Load(
        model={"model_type": "llama"} | sizes | heads, rows=arguments.rows, length=arguments.sequence_length
    )
    names = [*arguments.systems]
    if arguments.torchft is not None:
        names += ["torchft:every=10", "torchft:every=50"]
    found = []
    for pace in (
        Pace(mbit=mbit or None, delay_ms=delay) for mbit in arguments.mbit for delay in arguments.delay_ms
    ):
        print(f"\n{pace}:\n")
        columns = (
            "system",
            "tokens/s",
            "of " + BASE,
            "undisturbed",
            "of " + BASE,
            "MB sent a step",
            BASE + "'s of it",
        )
        columns += "CPU ms a step", "median step, ms", "a round, s", "hidden"
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
        base: dict[str, Any] | None = None
        for system in map(System.of, names):
            steps = system.steps(arguments.steps, arguments.synchronous_steps)
            row = measured(system, load, pace, steps, arguments.torchft)
            base = row if system.name == BASE else base
            print(_row(system, row, base), flush=True)
            found.append(row | {"system": str(system), "link": str(pace)})
    return found


def _row(system: System, row: dict[str, Any], base: dict[str, Any] | None) -> str:
    words = [str(system)]
    for key in ("tokens_per_second", "undisturbed"):
        words += [f"{row[key]:.0f}", "" if base is None else f"{row[key] / base[key]:.2f}"]
    words += [f"{row['bytes'] / 1e6:.4f}"]
    words += ["" if base is None else f"{base['bytes'] / row['bytes']:.2f}"]
    words += [f"{1000 * row['cpu']:.0f}", f"{1000 * row['median']:.0f}"]
    rounds = row["rounds"]
    words += [f"{statistics.median(its[key] for its in rounds):.2f}" if rounds else "" for key in _OF_ROUNDS]
    return f"| {' | '.join(words)} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parts = parser.add_subparsers(required=True)

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    def pair(text: str) -> tuple[float, float]:
        lr, momentum = text.split(",")
        return float(lr), float(momentum)

    add = (one := parts.add_parser("losses", help="held-out loss beside one job")).add_argument
    add("--islands", type=numbers, default=[2, 4], metavar="N,...", help="how many (default 2,4)")
    add("--every", type=numbers, default=[10, 50], metavar="N,...", help="steps between rounds")
    add("--wires", type=lambda text: text.split(","), default=["fp32", "int8"], metavar="WIRE,...")
    add("--outer", type=pair, nargs="+", default=[(1.0, 0.0)], metavar="LR,MOMENTUM")
    add("--steps", type=int, default=1000, metavar="N", help="steps in all (default 1000)")
    add("--before", type=int, metavar="N", help="of these, steps of one job first (default a quarter)")
    add("--batch", type=int, default=32, metavar="N", help="samples of a step of all islands (default 32)")
    add("--sequence-length", type=int, default=64, metavar="N", help="tokens of a sample (default 64)")
    add("--eval-tokens", type=int, default=32768, metavar="N", help="held-out tokens (default 32768)")
    add("--model", type=json.loads, default={}, metavar="JSON", help="sizes in place of the tiny preset's")
    one.set_defaults(part=losses)
    add = (two := parts.add_parser("links", help="tokens/s and bytes on slow links")).add_argument
    add("--mbit", type=numbers, default=[100], metavar="N,...", help="10^6 bit/s each way; 0: no limit")
    add("--delay-ms", type=numbers, default=[0], metavar="N,...", help="from end to end (default 0)")
    add("--systems", nargs="+", default=[*USUAL], metavar="NAME[:KEY=VALUE,...]", help=f"({' '.join(USUAL)})")
    add("--size", choices=SIZES, default="8M", help="parameters of the model (default 8M)")
    add("--rows", type=int, default=1, metavar="N", help="samples of a step at each end (default 1)")
    add("--sequence-length", type=int, default=128, metavar="N", help="tokens of a sample (default 128)")
    add("--steps", type=int, default=30, metavar="N", help="inner steps, at least, if there are rounds")
    add("--synchronous-steps", type=int, default=6, metavar="N", help="steps if there are none (default 6)")
    add("--torchft", type=Path, metavar="FOLDER", help="where torchft is installed")
    two.set_defaults(part=links)
    for part in (one, two):
        part.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
