"""A picture as an HTML page that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dsx.report.palette import FONT, INK


def page(title: str, picture: str, *, rows: Sequence[str] = ()) -> str:
    """A page around an SVG timeline; pointing at an action says what its title does.

    Args:
        title: Of the page.
        picture: The SVG: its actions are groups with a ``data-m``, the micro-batch, and a title.
        rows: Classes of what can be hidden in the picture.
    """
    boxes = "".join(f'<label><input type="checkbox" value="{row}" checked> {row}</label>\n' for row in rows)
    hide = f'<p class="rows">show\n{boxes}</p>\n' if rows else ""
    return _PAGE.format(title=escape(title), picture=picture, rows=hide, font=FONT, ink=INK)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 0; background: #fff; overflow: auto; font: 15px {font}; color: {ink} }}
.one g[data-m] {{ opacity: 0.18 }}
.one g.on {{ opacity: 1 }}
.off {{ visibility: hidden }}
.rows {{ position: sticky; left: 0; width: max-content; margin: 0; padding: 12px 24px 0 }}
.says {{ position: fixed; bottom: 0; left: 0; right: 0; margin: 0; padding: 8px 24px; background: #f6f7f9 }}
.says:empty {{ display: none }}
</style>
{rows}{picture}<p class="says"></p>
<script>
// Pointing at an action says when it ran, keeps its micro-batch bright and dims the others.
const picture = document.querySelector("svg");
const says = document.querySelector(".says");
picture.addEventListener("mouseover", (event) => {{
  const box = event.target.closest("g[data-m]");
  picture.classList.toggle("one", box !== null);
  says.textContent = box ? box.querySelector("title").textContent : "";
  for (const other of picture.querySelectorAll("g.on")) other.classList.remove("on");
  if (box)
    for (const other of picture.querySelectorAll(`g[data-m="${{box.dataset.m}}"]`)) other.classList.add("on");
}});
picture.addEventListener("mouseleave", () => picture.classList.remove("one"));
for (const input of document.querySelectorAll(".rows input"))
  input.addEventListener("change", () => {{
    for (const row of picture.querySelectorAll(`.${{input.value}}`))
      row.classList.toggle("off", !input.checked);
  }});
</script>
</html>
"""
