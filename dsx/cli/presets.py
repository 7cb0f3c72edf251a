"""``dsx presets``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from dsx.cli.options import FORMAT
from dsx.cli.output import say


def presets(style: Annotated[Literal["table", "json"], FORMAT] = "table") -> None:
    """List the models that dsx.model.preset can name.

    As JSON with their Hugging Face configs.
    """
    from dsx.config.presets import presets as known
    from dsx.plan.hf_config import model_spec
    from dsx.plan.params import num_parameters

    rows: list[dict[str, Any]] = []
    for preset in known():
        model = model_spec(preset.config)
        rows.append(
            {
                "family": preset.family,
                "preset": preset.name,
                "parameters": num_parameters(model),
                "layers": model.num_layers,
                "hidden": model.hidden_size,
                "heads": model.num_heads,
                "kv_heads": model.num_kv_heads,
                "about": preset.about,
                "config": preset.config,
            }
        )
    if style == "json":
        say(json.dumps(rows, indent=2))
        return
    sizes = "{layers:>6} {hidden:>6} {heads:>5} {kv_heads:>8}"
    layout = f"{{family:<8}} {{preset:<12}} {{parameters:>14}} {sizes}  {{about}}"
    titles = ("family", "preset", "parameters", "layers", "hidden", "heads", "kv_heads", "about")
    say(layout.format_map({title: title for title in titles}))
    for row in rows:
        say(layout.format_map(row | {"parameters": f"{row['parameters']:,}"}))
