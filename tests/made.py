"""Checkpoints made by hand for tests: random tensors in one plain file, and what a rank must hold of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsx.checkpoint.catalog import Catalog, Entry, Piece, check_files
from dsx.checkpoint.claims import model_of
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, ConversionReport, execute
from dsx.checkpoint.formats import native
from dsx.checkpoint.formats.torch_file import TorchFile
from dsx.checkpoint.pieces import contiguous
from dsx.checkpoint.read import verify
from dsx.checkpoint.reshard import Conversion
from dsx.models.param import ParamSpec
from dsx.models.params import layer_kinds, param_specs
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh
from dsx.parallel.partition import partition

CONFIGS = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 37,
        "n_positions": 8,
        "n_embd": 12,
        "n_layer": 3,
        "n_head": 2,
    },
    "qwen2": {
        "model_type": "qwen2",
        "vocab_size": 37,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8,
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8,
    },
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 8,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 41,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
    },
}
BF16 = {"weight": "bfloat16", "master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
FP32 = {"weight": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
_WORDS = {"float32": "<u4", "bfloat16": "<u2"}


def layout(
    family: str | Mapping[str, object], *, pp=1, dp=1, tp=1, chunks=1, zero=0, multiple=8, placement="loop"
) -> Layout:
    """A small model over ranks."""
    model = model_of(CONFIGS[family] if isinstance(family, str) else family)
    kinds = layer_kinds(model)
    stages = partition("uniform", pp * chunks, pp, parameters=[1] * len(kinds), costs=None, names=list(kinds))
    return Layout(
        mesh=Mesh.of(pp=pp, dp=dp, tp=tp),
        stages=replace(stages, placement=placement),
        params=param_specs(model, pad_multiple=multiple),
        zero_stage=zero,
    )


def random_bits(specs: Sequence[ParamSpec], states: Mapping[str, str], seed: int = 0) -> dict:
    """Random bits, as unsigned integers, for every (name, state)."""
    generator = np.random.default_rng(seed)
    return {
        (spec.name, state): generator.integers(
            0, 256, size=(*spec.shape, np.dtype(_WORDS[dtype]).itemsize), dtype=np.uint8
        )
        .view(_WORDS[dtype])
        .reshape(spec.shape)
        for spec in specs
        for state, dtype in states.items()
    }


def plain(
    folder: Path, specs: Sequence[ParamSpec], states: Mapping[str, str], *, seed=0, facts=None, bits=None
) -> Catalog:
    """A checkpoint with every tensor whole, one after another in one file."""
    folder.mkdir(parents=True)
    bits = bits or random_bits(specs, states, seed)
    entries, at = [], 0
    with (folder / "all.bin").open("wb") as file:
        for name, state in ((spec.name, state) for spec in specs for state in states):
            array = bits[name, state]
            piece = Piece("all.bin", at, (0,) * array.ndim, array.shape, contiguous(array.shape))
            entries.append(
                Entry(name=name, state=state, shape=array.shape, dtype=states[state], pieces=(piece,))
            )
            at += file.write(array.tobytes())
    return Catalog(root=folder, format="plain", entries=tuple(entries), facts=facts or {}, specs=tuple(specs))


def reshard(
    source: Catalog, folder: Path, to: Layout, *, tile=64, options=None, precision=None
) -> ConversionReport:
    """Convert to dsx's own format in a layout, by tiles of ``tile`` elements unless the source has a size."""
    target = native.target_of(source, folder, to, precision=precision)
    made = plan(with_tiles(source, tile), target.catalog)
    return execute(source, target, made, options or ConversionOptions())


def prepared(source: Catalog, folder: Path, to: Layout) -> Conversion:
    """A conversion to dsx's own format, not done yet."""
    target = native.target_of(source, folder, to)
    check_files(source)
    return Conversion(source=source, target=target, layout=None, plan=plan(source, target.catalog))


def with_tiles(catalog: Catalog, tile: int) -> Catalog:
    """A catalog that asks for tiles of a size, if it has none yet."""
    return catalog if catalog.tile_elements else replace(catalog, tile_elements=tile)


def bits_of(tensor) -> np.ndarray:
    """A torch tensor's bits, as :func:`random_bits` has them."""
    import torch  # here: what runs without it starts faster

    name = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(flat.tobytes(), _WORDS[name]).reshape(tuple(tensor.shape))


def num_bytes(folder: Path) -> int:
    """Bytes of the tensors in a dsx checkpoint."""
    return native.catalog_of(folder).num_bytes


def check_storages(file: TorchFile) -> None:
    """Raise the first thing that is wrong with the bytes of a file of torch, by the CRC32s in it."""
    catalog = Catalog(root=file.path.parent, format="torch", entries=(), checksums=file.checksums)
    for damage in verify(catalog):
        raise damage
