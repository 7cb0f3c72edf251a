"""The table of families in docs/guides/models.md, made from what the parity tests train. Not a test.

``python -m parity.families_table`` in tests/ prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsx.models.hf_config import FAMILIES
from dsx.models.presets import presets
from parity.dsx_run import Case
from parity.oracle import CONFIGS

HEADER = ("`model_type`", "class", "modules", "published presets", "trained in")


def table(cases: Iterable[Case]) -> str:
    """Markdown, a row for each family that ``cases`` train."""
    of_family: dict[str, list[Case]] = {}
    for case in cases:
        of_family.setdefault(case.family, []).append(case)
    rows = [HEADER, ("---",) * len(HEADER)]
    for family, known in of_family.items():
        named = [p.name for p in presets() if p.family == family and p.about.startswith("hub:")]
        rows.append(
            (
                f"`{family}`",
                f"`{CONFIGS[family]['architectures'][0]}`",
                "dsx's" if family in FAMILIES else "transformers'",
                ", ".join(f"`{name}`" for name in named),
                _layouts(known),
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _layouts(cases: Sequence[Case]) -> str:
    """What the layouts of the cases reach, not each of them."""

    def most(name: str) -> int:
        return max(getattr(case, name) for case in cases)

    stages = ", ".join(str(zero) for zero in sorted({case.zero for case in cases}))
    split = {"zb_h1", "zbv", "interleaved_zb"} & {case.schedule for case in cases}
    found = [
        f"tp {most('tp')}, pp {most('pp')}",
        f"{most('chunks')} chunks" if most("chunks") > 1 else "",
        f"ZeRO {stages}",
        "split backward" if split else "",
        "recompute" if any(case.recompute != "none" for case in cases) else "",
    ]
    return ", ".join(filter(None, found))


if __name__ == "__main__":
    from parity.test_layout_parity import TABLE

    print(table(TABLE))
