"""Which of transformers' causal language models train right in 3D, family by family, and the guide's table.

    python tools/families.py                           # whatever the results lack
    python tools/families.py --family llama qwen3_next --layout tp-pp zb
    python tools/families.py --again bad               # what was refused or failed once more
    python tools/families.py --options --layout tp2    # every option of every family
    python tools/families.py --table                   # write both tables into docs/guides/models.md

    python tools/families.py --composite               # composite families, their text beside a frozen tower

Composite families, whose language model is trained inside a folder with a tower, have a table of their own,
in one layout: the language model is one of the other table, and what is left to show are folders.

A tiny random model of each family of the installed transformers is trained three AdamW steps with
clipping by one process of transformers, and by dsx on gloo ranks in seven layouts; losses, gradient
norms, the exported folder and the model that is read back from it are compared
(tools/all_families/parity.py). A family that dsx refuses by name is told apart from one that comes out
wrong or breaks. With ``--options`` a family's options (all_families/options.py) are tried one by one,
each for a step in four layouts, by ranks that stay (all_families/crew.py). Results are kept as they
come, so that the tool can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from all_families import crew, parity, table, tiny  # noqa: E402 (found there)

from dsx.checkpoint.store import write_atomically  # noqa: E402

Json = dict[str, Any]


def main() -> int:
    """Prove what is asked for, or write the table; 1 if anything failed."""
    arguments = _arguments()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    results = _read(arguments.results)
    if arguments.table:
        page = ROOT / "docs/guides/models.md"
        known = _read_cases(arguments.option_results)
        return (table.write(page, results) if results["families"] else 0) or (
            table.write_options(page, known) if known else 0
        )
    if arguments.options:
        return _options(arguments)
    work = _work(arguments, results)
    if arguments.again:
        for family, layouts in work.items():
            known = results["families"].get(family, {}).get("layouts", {})
            for layout in layouts:
                known.pop(layout, None)
    began, total = time.monotonic(), len(work)
    for done, (family, found) in enumerate(_proved(work, arguments), 1):
        entry = results["families"].setdefault(family, {"layouts": {}})
        layouts = {**entry.get("layouts", {}), **found.pop("layouts")}
        results["families"][family] = {**found, "layouts": layouts}
        results |= {"versions": _versions()}
        _write(arguments.results, results)
        left = (time.monotonic() - began) / done * (total - done)
        print(f"{done}/{total}, {left / 60:.0f} min left", flush=True)
    print(table.summary(results))
    cases = [case for entry in results["families"].values() for case in entry["layouts"].values()]
    return int(any(case["result"] == "failed" for case in cases))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    families = "these alone (default all); NAME+FIELD sets a field of its config"
    parser.add_argument("--family", nargs="+", metavar="NAME", help=families)
    parser.add_argument(
        "--layout",
        nargs="+",
        choices=[*parity.LAYOUTS, *crew.LAYOUTS],
        help=f"these layouts alone (default all); of options {', '.join(crew.LAYOUTS)}",
    )
    parser.add_argument("--composite", action="store_true", help="the composite families")
    parser.add_argument("--options", action="store_true", help="the options of families")
    parser.add_argument(
        "--option-results",
        type=Path,
        default=ROOT / "runs/options.jsonl",
        metavar="FILE",
        help="where those of options are kept (default runs/options.jsonl)",
    )
    parser.add_argument(
        "--implementation",
        choices=("auto", "dsx", "transformers"),
        default="transformers",
        help="dsx.model.implementation (default transformers)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "runs/families.json",
        metavar="FILE",
        help="where results are kept (default runs/families.json)",
    )
    parser.add_argument("--again", choices=("all", "bad"), help="also cases that have a result, or a bad one")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="families at a time (default 1)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of a case (default 120)")
    parser.add_argument("--table", action="store_true", help="write the guide's tables from the results")
    arguments = parser.parse_args()
    layouts = crew.LAYOUTS if arguments.options else parity.LAYOUTS
    if unknown := [name for name in arguments.layout or () if name not in layouts]:
        parser.error(f"--layout {' '.join(unknown)}: choose from {', '.join(layouts)}")
    wanted = {name.partition("+")[0] for name in arguments.family or ()}
    if unknown := sorted(each for each in wanted - {*tiny.all_families()} if not tiny.is_composite(each)):
        parser.error(f"no causal language model of transformers: {', '.join(unknown)}")
    return arguments


def _options(arguments: argparse.Namespace) -> int:
    """Try options, each in one layout after another; 1 if one comes out wrong."""
    wanted = arguments.family or tiny.all_families()
    every = [crew.cases(family, arguments.implementation) for family in wanted]
    arguments.option_results.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(len(crew.LAYOUTS)):
        known = _read_cases(arguments.option_results)
        settled = {} if arguments.again == "all" else crew.settled(known)
        cases = [
            case
            for case in crew.rotated(every, turn)
            if case.layout in (arguments.layout or crew.LAYOUTS)
            and case.key not in settled
            and (
                arguments.again == "all"
                or (one := known.get(case.key)) is None
                or (arguments.again == "bad" and one["result"] in crew.BAD)
            )
        ]
        print(f"turn {turn + 1} of {len(crew.LAYOUTS)}: {len(cases)} cases", flush=True)
        began = time.monotonic()
        with arguments.option_results.open("a") as file:
            for done, (case, outcome) in enumerate(crew.outcomes(cases), 1):
                file.write(json.dumps({"key": case.key, **outcome}) + "\n")
                file.flush()
                left = (time.monotonic() - began) / done * (len(cases) - done) / 60
                told = " ".join(filter(None, (outcome["result"], outcome.get("reason", "")[:200])))
                print(f"{done}/{len(cases)}, {left:.0f} min  {' '.join(case.key)}  {told}", flush=True)
    known = _read_cases(arguments.option_results)
    print(table.options_summary(known))
    return int(any(one["result"] in crew.BAD for one in known.values()))


def _read_cases(path: Path) -> dict[tuple[str, ...], Json]:
    """The last outcome of every case."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {tuple(line["key"]): line for line in lines}


def _read(path: Path) -> Json:
    return json.loads(path.read_text()) if path.exists() else {"families": {}}


def _write(path: Path, results: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    results["families"] = dict(sorted(results["families"].items()))
    write_atomically(path, (json.dumps(results, indent=1) + "\n").encode())


def _versions() -> Json:
    names = ("transformers", "deepspeed", "torch", "dsx")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def _work(arguments: argparse.Namespace, results: Json) -> dict[str, list[str]]:
    """Family -> layouts to run."""
    wanted: dict[str, list[str]] = {}
    every = tiny.composite_families() if arguments.composite else tiny.all_families()
    for family in arguments.family or every:
        known = results["families"].get(family, {})
        layouts = [
            layout
            for layout in arguments.layout or table.layouts_of(family)
            if arguments.again == "all"
            or (case := known.get("layouts", {}).get(layout)) is None
            or (arguments.again == "bad" and case["result"] != "ok")
        ]
        alone = known.get("alone") and not tiny.is_composite(family)
        if layouts and (arguments.again or not alone):
            wanted[family] = layouts
    return wanted


def _proved(work: dict[str, list[str]], arguments: argparse.Namespace) -> Iterator[tuple[str, Json]]:
    """Each family with its facts and its layouts' results, as they come."""
    options = (arguments.implementation, arguments.timeout)
    if arguments.jobs == 1:
        yield from ((family, prove(family, layouts, *options)) for family, layouts in work.items())
        return
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), initializer=_end_with_parent) as pool:
        running = {pool.submit(prove, family, layouts, *options): family for family, layouts in work.items()}
        for future in as_completed(running):
            yield running[future], future.result()


def _end_with_parent() -> None:
    """Have this process end as soon as the one that started it does, whatever it is at."""
    parent = parent_process()
    assert parent is not None, "workers are started by a process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def prove(family: str, layouts: list[str], implementation: str, timeout: float) -> Json:
    """One family in some layouts, told as it goes."""
    try:
        text = family if tiny.is_composite(family) else tiny.text_family(family)
    except LookupError as error:
        print(f"{family:26} not tried: {error}", flush=True)
        return {"alone": str(error), "layouts": {}}
    if text != family:
        print(f"{family:26} its text model is {text}", flush=True)
        return {"alone": f"its text model is {text}", "text_family": text, "layouts": {}}
    found: Json = {"layouts": {}}
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        for layout, outcome in parity.prove(
            family,
            layouts,
            folder=Path(folder),
            implementation=implementation,
            timeout_seconds=timeout,
        ):
            if layout:
                found["layouts"][layout] = outcome
                said = " ".join(filter(None, (outcome["result"], outcome.get("reason", "")[:200])))
                print(f"{family:26} {layout:6} {outcome['seconds']:5.1f} s  {said}", flush=True)
            else:
                found |= outcome
        if "failed" in found:
            print(f"{family:26} transformers alone fails: {found['failed'][:200]}", flush=True)
            found["layouts"] = {}
    return found


if __name__ == "__main__":
    sys.exit(main())
