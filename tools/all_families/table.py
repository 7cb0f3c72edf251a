"""The results of tools/families.py as a page's table."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from all_families.crew import LAYOUTS as OPTION_LAYOUTS
from all_families.crew import settled
from all_families.parity import LAYOUTS
from all_families.tiny import all_families, composite_families, is_composite

from dsx.checkpoint.store import write_atomically

BEGIN, END = "<!-- families: begin (python tools/families.py --table) -->", "<!-- families: end -->"
OPTIONS_BEGIN = "<!-- options: begin (python tools/families.py --table) -->"
OPTIONS_END = "<!-- options: end -->"
_WITHOUT_REASON = {"ok": "ok", "none": ""}
HEAD, SEQUENCE = "`model_type`", "sequence parallelism"

COMPOSITE_LAYOUTS = ("tp-pp",)
"""Of composite families, which differ from their text models in folders and names alone."""

OPTION_RESULTS = ("ok", "same", "refused", "different", "traceback", "none")

Json = dict[str, Any]


def layouts_of(family: str) -> tuple[str, ...]:
    """In which layouts a family's row is."""
    return COMPOSITE_LAYOUTS if is_composite(family) else tuple(LAYOUTS)


def summary(results: Json) -> str:
    """How many families came through each layout."""
    lines = []
    families = results["families"]
    for name, layout in LAYOUTS.items():
        counts = Counter(
            entry["layouts"][name]["result"] for entry in families.values() if name in entry["layouts"]
        )
        told = ", ".join(f"{counts[result]} {result}" for result in ("ok", "refused", "failed"))
        lines.append(f"{layout!s:32} {told}")
    everywhere = [name for name, entry in families.items() if _results(name, entry) <= _WITHOUT_REASON.keys()]
    lines.append(f"{'in all':32} {len(everywhere)} of {len(families)}")
    return "\n".join(lines)


def write(page: Path, results: Json) -> int:
    """Put the table between its two markers; 1 if the page lacks them."""
    return _write_between(page, BEGIN, END, markdown(results))


def _write_between(page: Path, begin: str, end: str, made: str) -> int:
    text = page.read_text()
    if not (begin in text and end in text):
        print(f"{page} has no place for the table: {begin} and {end}")
        return 1
    before, after = text.partition(begin)[0], text.partition(end)[2]
    write_atomically(page, f"{before}{begin}\n{made}\n{end}{after}".encode())
    return 0


def options_summary(known: Mapping[tuple[str, ...], Json]) -> str:
    """How the options of families came out, a layout each."""
    lines, known = [], {**known, **settled(known)}
    for layout in OPTION_LAYOUTS:
        counts = Counter(one["result"] for key, one in known.items() if key[2] == layout)
        told = ", ".join(f"{counts[result]} {result}" for result in OPTION_RESULTS)
        lines.append(f"{layout:8} {told}")
    return "\n".join(lines)


def write_options(page: Path, known: Mapping[tuple[str, ...], Json]) -> int:
    """Put the options' summary between its two markers; 1 if the page lacks them."""
    return _write_between(page, OPTIONS_BEGIN, OPTIONS_END, options_markdown(known))


def options_markdown(known: Mapping[tuple[str, ...], Json]) -> str:
    """How many options there are, how they came out in every layout, and what is refused."""
    tried = {key: one for key, one in {**known, **settled(known)}.items() if one["result"] != "none"}
    families = {family for family, _, _ in tried}
    options = {key[:2] for key in tried if key[1]}
    head = ("layout", "families", *OPTION_RESULTS[:-1])
    rows = [head, ("---",) * len(head)]
    for name, layout in OPTION_LAYOUTS.items():
        own = {key: one for key, one in tried.items() if key[2] == name}
        counts = Counter(one["result"] for one in own.values())
        found = (str(counts[result]) for result in OPTION_RESULTS[:-1])
        rows.append((str(layout), str(len({key[0] for key in own})), *found))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    refused: dict[str, set[str]] = defaultdict(set)
    trains = {(family, layout) for (family, _, layout), one in tried.items() if one["result"] == "ok"}
    for (family, option, layout), one in tried.items():
        if one["result"] == "refused" and option and (family, layout) in trains:
            refused[_plain(family, one["reason"])].add(f"`{family}` {option}")
    reasons = [f"- {reason}: {_some(cases)}" for reason, cases in sorted(refused.items())]
    ran = sum(one["result"] != "same" for one in tried.values())
    said = (
        f"{ran:,} cases ran, of {len(options):,} options of {len(families)} families and of families as they "
        f"are; {len(tried) - ran:,} more are the same program as one that is right in that layout: the same "
        "modules, parameters, operators and bits in transformers' step, cut alike by dsx."
    )
    return "\n".join(
        [
            said,
            "",
            *lines,
            *(
                ["", "Refused by an option, of families that train otherwise:", "", *reasons]
                if reasons
                else []
            ),
        ]
    )


def _some(cases: set[str]) -> str:
    first = sorted(cases)[:3]
    return ", ".join(first) + f" and {len(cases) - len(first)} more" * (len(cases) > len(first))


def section(page: str) -> str:
    """What stands between the markers of a page."""
    return page.partition(BEGIN)[2].partition(END)[0]


def read(page: str) -> dict[str, dict[str, str]]:
    """Each family of a page's table but the composite ones, and what it says of every layout."""
    lines = [line for line in section(page).splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = [*LAYOUTS, SEQUENCE]
    found = {row[0].strip("`"): dict(zip(names, row[2:], strict=False)) for row in rows if row[0] != HEAD}
    return {name: row for name, row in found.items() if not is_composite(name)}


def markdown(results: Json) -> str:
    """The families that train, a row each; the others by why not; and the same of composite ones."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    entries = [each for each in all_families() if not is_composite(each)]
    own = [each for each in all_families() if is_composite(each)]
    return "\n".join(
        [
            *_part(results, entries, f"families with causal language models of their own ({versions})"),
            "",
            f"Composite families, {len(own)} of which transformers lists as causal language models too;",
            "text is trained, beside a tower that no rank reads.",
            "",
            *_part(results, composite_families(), "composite families"),
        ]
    )


def _part(results: Json, names: Sequence[str], what: str) -> list[str]:
    """Lines about some families, which are all composite or none."""
    families = {name: results["families"].get(name, {"layouts": {}}) for name in names}
    columns = layouts_of(names[0])
    trained = {name: entry for name, entry in families.items() if _is_trained(name, entry)}
    notes: dict[str, int] = {}
    last = (SEQUENCE, "left whole by tp") if "zb" in columns else ()
    head = (HEAD, "kind", *(str(LAYOUTS[each]) for each in columns), *last)
    rows = [head, ("---",) * len(head)]
    rows += [_row(name, entry, notes) for name, entry in trained.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    waiting = [
        f"`{name}`"
        for name, entry in families.items()
        if "missing" in _results(name, entry) and not entry.keys() & {"alone", "failed"}
    ]
    if waiting:
        lines += ["", f"Not run in every layout yet: {', '.join(waiting)}."]
    if notes:
        lines += ["", *(f"{number}. {reason}" for reason, number in notes.items())]
    others = defaultdict(list)
    for name, entry in families.items():
        if name not in trained and f"`{name}`" not in waiting:
            others[_why_none(name, entry)].append(f"`{name}`")
    if others:
        lines += ["", "Not trained:", ""]
        lines += [f"- {', '.join(names)}: {reason}" for reason, names in sorted(others.items())]
    return [f"{len(trained)} of {len(families)} {what}.", "", *lines]


def _is_trained(name: str, entry: Json) -> bool:
    """Whether every layout was run, and one came out right."""
    return "ok" in _results(name, entry) and "missing" not in _results(name, entry)


def _results(name: str, entry: Json) -> set[str]:
    found = {case["result"] for case in entry["layouts"].values()}
    return found if entry["layouts"].keys() >= {*layouts_of(name)} else found | {"missing"}


def _row(name: str, entry: Json, notes: dict[str, int]) -> tuple[str, ...]:
    def noted(case: Json) -> str:
        if case["result"] in _WITHOUT_REASON:
            return _WITHOUT_REASON[case["result"]]
        return f"{case['result']} ({notes.setdefault(_plain(name, case['reason']), len(notes) + 1)})"

    cells = {layout: entry["layouts"][layout] for layout in layouts_of(name)}
    if "zb" not in cells:
        return (f"`{name}`", entry["kind"], *map(noted, cells.values()))
    sequence = noted(cells["zb"])
    cells["zb"] = cells["zb"].get("without_sequence_parallelism", cells["zb"])
    whole = ""
    if entry["whole"]:
        names = ", ".join(f"`{name}`" for name in entry["whole"])
        whole = f"{entry['whole_share']:.0%}: {names}"
    return (f"`{name}`", entry["kind"], *map(noted, cells.values()), sequence, whole)


def _why_none(name: str, entry: Json) -> str:
    if "alone" in entry:
        return str(entry["alone"])
    if "failed" in entry:
        return _plain(name, f"transformers itself fails: {entry['failed']}")
    columns = layouts_of(name)
    plainest = "dp" if "dp" in columns else columns[0]  # dp cuts no layer and sends nothing
    return _plain(name, entry["layouts"][plainest]["reason"])


def _plain(name: str, reason: str) -> str:
    """On one line, without the family's name, and safe in a table."""
    reason = re.sub(r"^((model/config\.json|dsx\.model\.config): )?model_type = '[^']*': ", "", reason)
    return re.sub(rf"\b{re.escape(name)}\b", "it", " ".join(reason.split())).replace("|", "\\|")
