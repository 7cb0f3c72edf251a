"""An adapter alone as a folder of PEFT's, and an adapter merged into the weights that it adapts.

``W + scale B A`` of each matrix, with DoRA's magnitudes over the norms of its rows, is computed in float32
while the matrix is copied, tile by tile, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsx.checkpoint.catalog import Catalog, Entry, Target, left_behind
from dsx.checkpoint.claims import model_of_fact
from dsx.checkpoint.formats.huggingface.catalog import adapter_files, parted
from dsx.checkpoint.pieces import whole_part
from dsx.checkpoint.read import Reader
from dsx.config.adapter import peft_settings
from dsx.errors import CheckpointError
from dsx.models.adapters import PREFIX, combined, is_targeted_stack, peft_specs, targeted
from dsx.models.param import Box, ParamSpec
from dsx.models.params import stored_specs
from dsx.models.spec import Adapter, Model

Floats = npt.NDArray[np.float32]

Change = Callable[[Floats, Box], Floats]
"""Given a tile, and which it is, what shall be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """What is added to one Hugging Face tensor.

    Attributes:
        module: Name of the adapted module in PEFT's files.
        rows: Those of B's rows that are the tensor's.
        turned: The tensor has its outputs last.
    """

    module: str
    rows: slice
    turned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """An adapter to be merged into the weights beside it.

    Attributes:
        source: Both, under the names of Hugging Face's and PEFT's files.
        products: What is added, by the tensor that it is added to.
    """

    source: Catalog
    adapter: Adapter
    products: Mapping[str, _Product]

    @contextmanager
    def changes(self) -> Iterator[Callable[[Entry], Change | None]]:
        """Gives, by entry, what changes a tile of it; None for what is not adapted."""
        with Reader(self.source) as reader:

            @lru_cache(maxsize=32)
            def read(name: str) -> Floats:
                entry = reader.find(name, "master")
                if entry is None:
                    what = f"{self.source.root}: tensor {name}"
                    raise CheckpointError(what, "the adapter lacks it", "use another checkpoint")
                flat = np.empty(entry.numel, np.float32)
                reader.fill(entry, [whole_part(entry.shape)], flat, "float32")
                return flat.reshape(entry.shape)

            def change(entry: Entry) -> Change | None:
                product = self.products.get(entry.name)
                return None if product is None else partial(self._merged, read, entry.name, product)

            yield change

    def _merged(
        self, read: Callable[[str], Floats], name: str, product: _Product, tile_RC: Floats, tile: Box
    ) -> Floats:
        outputs, inputs = (slice(*span) for span in (reversed(tile) if product.turned else tile))
        a, b = (read(f"{product.module}.lora_{which}.weight") for which in "AB")
        b = b[product.rows][outputs]
        base, dora = tile_RC.T if product.turned else tile_RC, None
        if self.adapter.type == "dora":
            magnitude = read(f"{product.module}.lora_magnitude_vector")[product.rows][outputs]

            def norms(whole: Floats) -> Floats:
                if (inputs.start, inputs.stop) != (0, a.shape[1]):
                    # Of a tensor with its outputs last, or with rows longer than a tile.
                    matrix = read(name).T if product.turned else read(name)
                    whole = combined(self.adapter.scale, matrix[outputs], a, b)
                found: Floats = np.linalg.norm(whole, axis=1)
                return found

            dora = magnitude, norms
        whole: Floats = combined(self.adapter.scale, base, a[:, inputs], b, dora)
        return np.ascontiguousarray(whole.T if product.turned else whole)


def taken_apart(source: Catalog) -> tuple[Catalog, Merge | None]:
    """A checkpoint of a whole model under Hugging Face's names without its adapter, and that to be merged."""
    model = _model(source)
    if model is None or model.adapter is None:
        return source, None
    adapter, specs = model.adapter, stored_specs(model) + model.tower_params
    if adapter.start != "none":
        raise CheckpointError(
            f"{source.root}: its adapter",
            f"it began with {adapter.start}, which has changed the matrices that it is merged into",
            "convert the adapter alone with --to peft, and merge with PEFT's merge_and_unload",
        )
    products: dict[str, _Product] = {}
    for spec in specs:
        if is_targeted_stack(adapter, spec):
            raise CheckpointError(
                f"{source.root}: {spec.hf_whole}",
                "adapters of experts' matrices are not merged here",
                "convert the adapter alone with --to peft, and merge with PEFT's merge_and_unload",
            )
        spans = dict(targeted(adapter, spec)) if not spec.adapts else {}
        for name, box in spec.hf_boxes if spans else ():
            low, high = box[0]
            for module, (first, stop) in spans.items():
                if first <= low and high <= stop:
                    rows = slice(low - first, high - first)
                    products[name] = _Product(module=PREFIX + module, rows=rows, turned=spec.hf_transposed)
    adapts = {name for spec in specs if spec.adapts for name in spec.hf}
    own = tuple(entry for entry in source.entries if entry.name not in adapts)
    return replace(source, entries=own), Merge(source=source, adapter=adapter, products=products)


def adapter_target(source: Catalog, root: Path) -> tuple[Catalog, Target]:
    """What was trained of a model with an adapter as a folder of PEFT's, and the source under its names."""
    model = _model(source)
    if model is None or model.adapter is None:
        raise CheckpointError(
            f"{root} as a folder of PEFT's", f"{source.root} has no adapter", "use --to hf for its weights"
        )
    specs = stored_specs(model)
    base, modules = (source.facts.get("base") or {}), (source.facts.get("composite") or {}).get("modules")
    entries = list(_under_peft_names(source, peft_specs(specs, modules)))
    named = replace(source, entries=tuple(entries))
    settings = peft_settings(specs, model, base.get("path"), modules)
    catalog, skeletons = adapter_files(named, root, settings)
    note = "A folder of PEFT's holds weights alone: optimizer states and counters stay behind."
    return named, Target(catalog=catalog, skeletons=skeletons, dropped=(*left_behind(source.facts), note))


def _under_peft_names(source: Catalog, specs: Sequence[ParamSpec]) -> Iterator[Entry]:
    held = source.by_name
    for spec in specs:
        states = held.get(spec.name, {})
        entry = states.get("master", states.get("weight"))
        if entry is None:
            what = f"{source.root}: tensor {spec.name}"
            raise CheckpointError(what, "the checkpoint lacks it", "use another checkpoint")
        own = [replace(part, aliases=()) for part in parted(spec, entry)]
        yield from own
        yield from (replace(own[0], name=name) for name in spec.hf_copies)


def _model(source: Catalog) -> Model | None:
    told = source.facts.get("model")
    if not isinstance(told, dict) or told.get("adapter") is None:
        return None
    tensor = (source.facts.get("mesh") or {}).get("tp", 1)
    return model_of_fact(told).for_tensor(tensor)
