"""What ``dsx.initialize`` says once, on the first rank's console, of layers of the caller's own."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsx.config.deepspeed import precision
from dsx.config.run import RunConfig
from dsx.engine.pipeline_module import PipelineModule
from dsx.engine.settings import Settings
from dsx.engine.stock_module import clips_by_itself
from dsx.kept import cache_folder, code_version, keep
from dsx.parallel.mesh import Mesh


def say(model: PipelineModule, settings: Settings, run: RunConfig | None) -> None:
    """Say that the layout is unproved, and where the losses differ from stock DeepSpeed's on purpose.

    Programs with a resolved config, ``run``, have not come from stock.
    """
    mesh, off = model.groups.mesh, run is not None and run.dsx.proof == "off"
    place = _place(model.layer_specs, mesh, settings.zero_stage)
    if mesh.size > 1 and not off and (place is None or not place.exists()):
        how = "prove a small model of them"
        divided = [title for title, degree in (("tensor", mesh.tp), ("context", mesh.cp)) if degree > 1]
        if divided:
            how = f"without {' and '.join(divided)} parallelism a small model of them can be proved"
        sys.stdout.write(
            f"dsx: these layers are not proved to train over {mesh.words} as in one process; {how} "
            "before yours are built: dsx.prove(make_layers, config) (docs/guides/checking.md)\n"
        )
    plain = settings.zero_stage == 0 and precision(settings.deepspeed) == "fp32"
    if run is None and plain and settings.clipping > 0 and mesh.pp > 1 and not clips_by_itself():
        sys.stdout.write(
            f"dsx: gradient_clipping = {settings.clipping:g} holds for the norm of the whole model; stock "
            "DeepSpeed in fp32 without ZeRO takes the first stage's, so that losses differ once it clips\n"
        )
    sys.stdout.flush()


def keep_proof_of(layers: Sequence[Any], mesh: Mesh, zero_stage: int) -> None:
    """Remember that layers of these kinds were proved in this layout (:func:`dsx.prove`)."""
    place = _place(layers, mesh, zero_stage)
    if place is not None:
        keep(place, mesh.words)


def _place(layers: Sequence[Any], mesh: Mesh, zero_stage: int) -> Path | None:
    """By the kinds of layers in their order, with their code: a small model has fewer of each kind.

    None where a kind has no file, so that nothing vouches for its code.
    """
    kinds = [getattr(layer, "typename", layer) for layer in layers]
    kinds = [kind if hasattr(kind, "__qualname__") else type(kind) for kind in kinds]
    said: list[Any] = [mesh.axes, zero_stage]
    for kind in dict.fromkeys(kinds):
        try:
            code = Path(inspect.getfile(kind)).read_bytes()
        except (OSError, TypeError):
            return None
        said.append((kind.__module__, kind.__qualname__, hashlib.sha256(code).hexdigest()))
    version = code_version("**/*.py", "**/*.toml")
    name = f"layers-{hashlib.sha256(repr(said).encode()).hexdigest()[:32]}"
    return cache_folder("proofs") / version / name
