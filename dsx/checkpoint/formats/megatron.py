"""Megatron-core's ``torch_dist`` checkpoints of Llama-like models, under dsx's names.

They are folders of torch.distributed.checkpoint (:mod:`dsx.checkpoint.formats.dcp`) with a ``metadata.json``.
What differs is how the model lies in them (megatron-core 0.16, transformer_block.py and attention.py):

- the layers of a block's tensor are stacked along a first dim, ``decoder.layers.mlp.linear_fc2.weight``; or,
  with layers that differ, numbered, ``decoder.layers.0.mlp.linear_fc2.weight``;
- ``linear_qkv`` has, for every group of query heads, its queries, its key and its value, one after another;
- a norm's key may be that of the linear after it: ``linear_qkv.layer_norm_weight``;
- vocabularies are padded; ``linear_fc1`` is the gate, then the other half;
- optimizer states are ``optimizer.state.<state>.<tensor>``, fp32 masters ``optimizer.state.fp32_param``;
  ``common.pt`` has the iteration, the optimizer's step count and its groups without their tensors.

The files do not say which model it is; the user does, by its config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsx.checkpoint import plain, store
from dsx.checkpoint.catalog import Catalog, Entry, Piece
from dsx.checkpoint.formats import dcp
from dsx.checkpoint.formats.deepspeed.reader import readable
from dsx.checkpoint.formats.torch_file import read_torch_file
from dsx.checkpoint.json_text import parsed
from dsx.checkpoint.pieces import clipped, whole
from dsx.errors import CheckpointError
from dsx.models.param import Box, ParamSpec
from dsx.models.spec import ModelSpec

FORMAT = "megatron"
MARK, COMMON = "metadata.json", "common.pt"
_BACKEND = "sharded_backend"
_LARGEST_MARK_BYTES = 1 << 20
_STATES = {"fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_OPTIMIZER = "optimizer.state."
# Names by dsx's module, the first that is there counts; {leaf} is weight or bias.
_BLOCK: Mapping[str, tuple[str, ...]] = {
    "norm_1": ("input_layernorm.{leaf}", "self_attention.linear_qkv.layer_norm_{leaf}"),
    "attention.qkv": ("self_attention.linear_qkv.{leaf}",),
    "attention.out": ("self_attention.linear_proj.{leaf}",),
    "norm_2": ("pre_mlp_layernorm.{leaf}", "mlp.linear_fc1.layer_norm_{leaf}"),
    "mlp.gate_up": ("mlp.linear_fc1.{leaf}",),
    "mlp.down": ("mlp.linear_fc2.{leaf}",),
}
_GIVE = "give the config of the model that was trained: --hf-config FILE, or CONFIG"


def looks_megatron(root: Path) -> bool:
    """Whether a folder has megatron-core's mark of a checkpoint in torch's format."""
    return _BACKEND in _mark(root)


def _mark(root: Path) -> dict[str, Any]:
    try:
        content = parsed(store.content_of(root / MARK, _LARGEST_MARK_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def catalog_of(root: Path) -> Catalog:
    """What a Megatron checkpoint holds, under its names and in its order; see :func:`as_dsx`."""
    backend = _mark(root).get(_BACKEND)
    if backend != "torch_dist" or not dcp.looks_dcp(root):
        raise CheckpointError(
            str(root / MARK),
            f"a Megatron checkpoint of the format {backend}, which dsx cannot read",
            "save it with Megatron's --ckpt-format torch_dist",
        )
    found = dcp.catalog_of(root, objects=False)
    return replace(found, format=FORMAT, entries=tuple(map(_told, found.entries)), facts=_facts(root))


def _facts(root: Path) -> dict[str, Any]:
    """Step counts and hyperparameters. With several groups nothing says which tensors each has."""
    if not (root / COMMON).is_file():
        return {}
    file = read_torch_file(root, COMMON)
    content = readable(file.content, file) if isinstance(file.content, dict) else {}
    optimizer = content.get("optimizer")
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    groups, step = optimizer.get("param_groups") or [], (optimizer.get("state") or {}).get("common_step")
    facts: dict[str, Any] = {"step": int(content.get("iteration") or 0)}
    if len(groups) == 1:
        told = {str(key): value for key, value in groups[0].items() if key != "params"}
        facts["optimizer"] = "AdamW" if told.get("decoupled_weight_decay", True) else "Adam"
        facts["param_groups"] = [{**plain.encode(told, COMMON), "names": [], "step": step}]
    elif groups:
        facts["left_behind"] = [f"hyperparameters of {len(groups)} optimizer groups of unknown tensors"]
    return facts


def _told(entry: Entry) -> Entry:
    """Name and state of a tensor by its key; what is not the optimizer's is a weight."""
    key = entry.name
    if key.startswith(_OPTIMIZER):
        state, _, name = key.removeprefix(_OPTIMIZER).partition(".")
        if state in _STATES:
            return replace(entry, name=_bare(name), state=_STATES[state])
    return replace(entry, name=_bare(key))


def _bare(name: str) -> str:
    return name.removeprefix("module.").removeprefix("model.")


def as_dsx(source: Catalog, specs: Sequence[ParamSpec], model: ModelSpec) -> Catalog:
    """The same checkpoint with dsx's names, shapes and order of queries, keys and values."""
    held = source.by_name
    entries: list[Entry] = []
    for spec in specs:
        entries += _of_spec(source, spec, held, model)
    facts = dict(source.facts)
    facts["param_groups"] = [
        {**group, "names": [spec.name for spec in specs]} for group in facts.get("param_groups", ())
    ]
    used = {_home(spec, held)[0] for spec in specs}
    rest = [str(entry) for entry in source.entries if entry.name not in used]
    if rest:
        facts["left_behind"] = [*facts.get("left_behind", ()), *rest]
    return replace(source, entries=tuple(entries), specs=tuple(specs), facts=facts)


def _of_spec(
    source: Catalog, spec: ParamSpec, held: Mapping[str, Mapping[str, Entry]], model: ModelSpec
) -> Iterator[Entry]:
    name, layer = _home(spec, held)
    if name not in held:
        raise CheckpointError(
            f"{source.root}: tensor {name}", f"it is missing, and is the model's {spec.name}", _GIVE
        )
    for state, entry in held[name].items():
        found = entry if layer is None else _unstacked(source, entry, layer)
        if ".attention.qkv." in spec.name:
            found = _ungrouped(found, model)
        yield _fitted(source, found, spec, state)


def _home(spec: ParamSpec, held: Mapping[str, object]) -> tuple[str, int | None]:
    """Megatron's name of a tensor, or the first possible one; and the layer, if layers are stacked."""
    names = list(_candidates(spec, spec.layer - 1))  # after the word embedding
    return next((one for one in names if one[0] in held), names[0])


def _candidates(spec: ParamSpec, block: int) -> Iterator[tuple[str, int | None]]:
    """Names that a tensor may have; with the layer to take, where layers are stacked."""
    module, _, leaf = spec.name.partition(".")[2].rpartition(".")
    if module == "word":
        yield ("output_layer.weight" if spec.layer else "embedding.word_embeddings.weight"), None
    elif module == "norm":
        yield f"decoder.final_layernorm.{leaf}", None
    else:
        for name in _BLOCK[module]:
            yield f"decoder.layers.{name.format(leaf=leaf)}", block
            yield f"decoder.layers.{block}.{name.format(leaf=leaf)}", None


def _unstacked(source: Catalog, entry: Entry, layer: int) -> Entry:
    if not entry.shape or layer >= entry.shape[0]:
        raise CheckpointError(
            f"{source.root}: {entry}", f"its shape {entry.shape} has no layer {layer}", _GIVE
        )
    box = ((layer, layer + 1), *whole(entry.shape[1:]))
    pieces = tuple(
        replace(piece, start=piece.start[1:], shape=piece.shape[1:], strides=piece.strides[1:])
        for piece in clipped(entry, box)
    )
    return replace(entry, shape=entry.shape[1:], pieces=pieces)


def _ungrouped(entry: Entry, model: ModelSpec) -> Entry:
    """Rows from (group: queries, key, value) order to all queries, all keys, all values."""
    groups, head = model.num_kv_heads, model.head_dim
    queries = model.query_size // groups
    size = queries + 2 * head
    pieces: list[Piece] = []
    for group in range(groups):
        low = group * size
        homes = (
            (low, queries, group * queries),
            (low + queries, head, model.query_size + group * head),
            (low + queries + head, head, model.query_size + model.kv_size + group * head),
        )
        for start, rows, home in homes:
            box: Box = ((start, start + rows), *whole(entry.shape[1:]))
            pieces += [
                replace(piece, start=(piece.start[0] - start + home, *piece.start[1:]))
                for piece in clipped(entry, box)
            ]
    return replace(entry, pieces=tuple(pieces))


def _fitted(source: Catalog, entry: Entry, spec: ParamSpec, state: str) -> Entry:
    """The entry under its new name, without the padding of a vocabulary."""
    padded = (
        spec.pad_multiple is not None and entry.shape[1:] == spec.shape[1:] and entry.shape[0] > spec.shape[0]
    )
    if not padded and entry.shape != spec.shape:
        raise CheckpointError(
            f"{source.root}: {entry}", f"its shape is {entry.shape}, the model's {spec.shape}", _GIVE
        )
    kept = clipped(entry, whole(spec.shape))
    return replace(entry, name=spec.name, state=state, shape=spec.shape, pieces=kept, role="trained")
