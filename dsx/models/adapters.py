"""The parameters of low-rank adapters, made of those of the matrices that they adapt. Pure data.

An adapter adds ``scale * B A`` to a matrix [out, in], with A [rank, in] and B [out, rank]. Where
transformers has several linears and dsx has one for them (queries, keys and values; gate and up), each of
transformers' has a rank of its own, as in PEFT, and dsx's linear has their As one above the other, and so
their Bs. Names of tensors are those in PEFT's files (peft/utils/save_and_load.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

from dsx.models.param import Init, ParamSpec
from dsx.models.spec import Adapter

ALL_LINEAR = "all-linear"
"""The word of PEFT for every linear but the head."""

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
"""Ends of the names of an adapter's parameters."""

PREFIX = "base_model.model."
IN_FILES = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
"""What the names of tensors in PEFT's files begin with, and those of an adapter's end in."""

_HEAD = "lm_head"
_MATRIX = 2  # dims


def adapted(specs: Iterable[ParamSpec], adapter: Adapter) -> tuple[ParamSpec, ...]:
    """A model's parameters and behind those of each module the parameters of its adapter.

    The model's own are frozen unless the adapter says that they are trained too, and nobody froze them.
    """
    found: list[ParamSpec] = []
    for _, group in groupby(specs, key=lambda spec: spec.name.rpartition(".")[0]):
        own = list(group)
        found += [_of_model(adapter, spec) for spec in own]
        before = 0
        for spec in own:
            held = tuple(targeted(adapter, spec))
            found += _of_linear(adapter, spec, held, before)
            before += len(held)
        stacks = [spec for spec in own if is_targeted_stack(adapter, spec)]
        for place, spec in enumerate(stacks):
            found += _of_stack(adapter, spec, len(stacks) - 1 - place)
    return tuple(found)


def _of_model(adapter: Adapter, spec: ParamSpec) -> ParamSpec:
    """A parameter of the model itself beside the adapter."""
    trained = spec.trained and trains(adapter, spec)
    whole = trained or spec.read or is_stack(spec) or bool(spec.float32)
    quantized = adapter.quantization if spec.linear and not whole else "none"
    return replace(spec, trained=trained, quantized=quantized)


def modules_of(spec: ParamSpec) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Transformers' modules whose parameters a parameter is made of, each with its rows.

    >>> modules_of(ParamSpec(name="1.qkv.weight", layer=1, shape=(6, 4), init=Init(kind="zeros"), split=0,
    ...                      parts=(4, 1, 1), hf=("h.0.q.weight", "h.0.k.weight", "h.0.v.weight")))
    (('h.0.q', (0, 4)), ('h.0.k', (4, 5)), ('h.0.v', (5, 6)))
    """
    whole = (0, spec.shape[0]) if spec.shape else (0, 1)
    if spec.hf_whole:
        return ((_owner(spec.hf_whole), whole),)
    if len(spec.hf) == 1:
        # Its name in files of GPT-NeoX is an older one.
        return ((_HEAD if spec.hf[0] == "embed_out.weight" else _owner(spec.hf[0]), whole),)
    return tuple((_owner(name), box[0]) for name, box in spec.hf_boxes)


def _owner(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def names_of(spec: ParamSpec) -> tuple[str, ...]:
    """The same modules by all their names: the head too, if it is tied to the word embedding."""
    copies = tuple(map(_owner, spec.hf_copies)) or (() if spec.tie is None else (_HEAD,))
    return tuple(name for name, _ in modules_of(spec)) + copies


def trains(adapter: Adapter, spec: ParamSpec) -> bool:
    """Whether a parameter of the model itself is trained beside the adapter; of a buffer it says nothing."""
    return spec.buffer or any(is_also(adapter, name) for name in names_of(spec))


def is_also(adapter: Adapter, module: str) -> bool:
    """Whether a module, or one that it is a part of, is named as trained.

    See _set_trainable in peft/utils/other.py.
    """
    paths = accumulate(module.split("."), lambda path, name: f"{path}.{name}")
    return any(path.endswith(key) for path in paths for key in adapter.train_also)


def targeted(adapter: Adapter, spec: ParamSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Those of :func:`modules_of` that get an adapter: linears of blocks, as PEFT chooses them.

    "all-linear" are the language model's. See check_target_module_exists in peft/tuners/tuners_utils.py.
    """
    if not spec.linear or is_stack(spec) or (spec.tower and adapter.targets == ALL_LINEAR):
        return
    for module, rows in modules_of(spec):
        kept = any(re.match(rf"(^|.*\.){key}($|\..*)", module) for key in adapter.train_also)
        if not kept and names(adapter.targets, module):
            yield module, rows


def is_stack(spec: ParamSpec) -> bool:
    """Whether a parameter is experts' matrices, one behind the other."""
    return spec.linear and len(spec.shape) > _MATRIX


def is_targeted_stack(adapter: Adapter, spec: ParamSpec) -> bool:
    """Whether experts' matrices get an adapter each.

    PEFT goes by the parameter's name: _inject_parameters in peft/tuners/tuners_utils.py.
    """
    return is_stack(spec) and not trains(adapter, spec) and names(adapter.target_parameters, spec.hf_whole)


def names(targets: str | tuple[str, ...], module: str) -> bool:
    """Whether targets name a module.

    >>> names(("q_proj",), "layers.0.q_proj"), names(("proj",), "layers.0.q_proj"), names(".*proj", "q_proj")
    (True, False, True)
    """
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def of_layer(adapter: Adapter, specs: Iterable[ParamSpec]) -> Adapter:
    """An adapter as it says what it says of one layer, in the same words for layers that it treats alike."""
    held = [spec for spec in specs if not spec.adapts]
    targets = {name for spec in held for name, _ in targeted(adapter, spec)}
    also = {
        name for spec in held if trains(adapter, spec) and not spec.buffer for name, _ in modules_of(spec)
    }
    inside, at = ({re.sub(r"^.*?\.\d+(?=\.)", "", name) for name in each} for each in (targets, also))
    ends = tuple(sorted(name.removeprefix(".") for name in inside))
    stacks = (spec.name.partition(".block.")[2] for spec in held if is_targeted_stack(adapter, spec))
    parameters = tuple(sorted(stacks))
    return replace(adapter, targets=ends, target_parameters=parameters, train_also=tuple(sorted(at)))


def _of_linear(
    adapter: Adapter, base: ParamSpec, held: tuple[tuple[str, tuple[int, int]], ...], before: int
) -> Iterator[ParamSpec]:
    """A, B and magnitude for a matrix; ``before`` counts targets of the same module in its other matrices."""
    if not held:
        return
    inputs, rank, owner = base.shape[1], adapter.rank, _owner(base.name)
    start = base.name.removesuffix("weight")
    rows = tuple(stop - first for _, (first, stop) in held)
    outputs = sum(rows)
    a_cut: dict[str, Any] = {"split": 1, "parts": base.parts} if base.split == 1 else {}
    b_cut: dict[str, Any] = (
        {"split": 0, "parts": _parts(base, [span for _, span in held])} if base.split == 0 else {}
    )
    # Values of torch.nn.Linear: uniform below 1 / sqrt(inputs). They are the same in whatever form.
    values = Init(
        kind="uniform",
        std=(3 * inputs) ** -0.5,
        part_of="" if start == f"{owner}." else f"{owner}.{A}",
        first_row=before * rank,
    )
    made: list[tuple[str, tuple[int, ...], Init, dict[str, Any], tuple[int, ...]]] = [
        (A, (rank * len(held), inputs), values, a_cut, (rank,) * len(held)),
        (B, (outputs, rank), Init(kind="zeros"), b_cut, rows),
    ]
    if adapter.type == "dora":
        made.append((MAGNITUDE, (outputs,), Init(kind="row_norms"), b_cut, rows))
    for leaf, shape, init, cut, parts in made:
        several: dict[str, Any] = {"hf_split": 0, "hf_parts": parts} if len(held) > 1 else {}
        hf = tuple(f"{PREFIX}{module}.{IN_FILES[leaf]}" for module, _ in held)
        yield ParamSpec(
            name=start + leaf,
            layer=base.layer,
            shape=shape,
            init=init,
            hf=hf,
            adapts=base.name,
            tower=base.tower,
            float32=base.float32,
            **cut,
            **several,
        )


def _of_stack(adapter: Adapter, base: ParamSpec, inside: int) -> Iterator[ParamSpec]:
    """A and B of experts' matrices: A has each expert's ranks together, B each rank's experts.

    PEFT wraps a module once for each of its parameters: ``inside`` counts the wrappers around this one's
    (ParamWrapper in peft/tuners/lora/layer.py).
    """
    experts, outputs, inputs = base.shape
    start = f"{PREFIX}{_owner(base.hf_whole)}.{'base_layer.' * inside}"
    values, ranks = Init(kind="uniform", std=(3 * inputs) ** -0.5), experts * adapter.rank
    made: list[tuple[str, tuple[int, int], Init, int]] = [
        (A, (ranks, inputs), values, 2),
        (B, (outputs, ranks), Init(kind="zeros"), 1),
    ]
    for leaf, shape, init, dim in made:
        cut: dict[str, Any] = {"split": dim - 1, "parts": base.parts} if base.split == dim else {}
        if base.experts is not None:
            cut |= {"experts": 0} if leaf == A else {"experts": 1, "expert_blocks": adapter.rank}
        name, hf = f"{base.name}_{leaf}", (f"{start}{IN_FILES[leaf]}",)
        cut |= {"adapts": base.name, "float32": base.float32}
        yield ParamSpec(name=name, layer=base.layer, shape=shape, init=init, hf=hf, **cut)


def is_factor(name: str) -> bool:
    """Whether a tensor in PEFT's files is of an adapter, and not a parameter of the model itself."""
    return name.startswith(PREFIX) and name.endswith(tuple(IN_FILES.values()))


def homes(specs: Sequence[ParamSpec]) -> Iterator[tuple[str, str, bool]]:
    """Every matrix of transformers' that has an adapter.

    Yields:
        The name of the matrix, what the names of its factors in PEFT's files begin with, and whether it is
        transposed in transformers' module, as GPT-2's are.
    """
    bases = {spec.name: spec for spec in specs}  # without those of the tower, which a text model has not
    end = IN_FILES[A]
    for spec in specs:
        for name in spec.hf if spec.adapts in bases and spec.name.endswith(A) else ():
            base, start = bases[spec.adapts], name.removesuffix(end)
            if len(base.shape) > _MATRIX:
                yield base.hf_whole, start, False
            else:
                yield f"{start.removeprefix(PREFIX)}weight", start, base.hf_transposed


def _parts(base: ParamSpec, held: list[tuple[int, int]]) -> tuple[int, ...]:
    """Those of a matrix's parts along its outputs that lie in the rows ``held``."""
    ends = accumulate(base.parts)
    return tuple(
        size
        for size, end in zip(base.parts, ends, strict=True)
        if any(first <= end - size and end <= stop for first, stop in held)
    )


def placed(name: str, modules: Mapping[str, str]) -> str:
    """A name of a module or a tensor where a larger model has those of some paths.

    >>> placed("model.norm", {"model": "model.language_model", "lm_head": "lm_head"})
    'model.language_model.norm'
    """
    path = next((path for path in modules if f"{name}.".startswith(f"{path}.")), "")
    return modules[path] + name.removeprefix(path) if path else name


def peft_specs(specs: Iterable[ParamSpec], modules: Mapping[str, str] | None = None) -> tuple[ParamSpec, ...]:
    """What is trained, under the names of PEFT's files; ``modules`` as of :func:`placed`."""
    return tuple(in_peft(spec, modules) for spec in specs if spec.trained and not spec.buffer)


def in_peft(spec: ParamSpec, modules: Mapping[str, str] | None = None) -> ParamSpec:
    """A parameter under the names of PEFT's files, which have a model's own in the form of its modules."""
    if modules and not spec.tower:
        own = in_peft(spec)
        hf, copies = (
            tuple(PREFIX + placed(name.removeprefix(PREFIX), modules) for name in names)
            for names in (own.hf, own.hf_copies)
        )
        return replace(own, hf=hf, hf_copies=copies)
    if spec.adapts:
        return spec
    leaf, parts = spec.in_module.rpartition(".")[2], modules_of(spec)
    names = tuple(f"{PREFIX}{module}.{leaf}" for module in names_of(spec))
    hf, copies = names[: len(parts)], names[len(parts) :]
    if not spec.hf_whole:
        return replace(spec, hf=hf, hf_copies=copies)
    form: dict[str, Any] = {"hf_stacked": False, "hf_split": None, "hf_parts": (), "hf_transposed": False}
    return replace(spec, hf=hf, hf_copies=copies, hf_whole="", **form)


def combined(
    scale: float, weight: Any, a: Any, b: Any, dora: tuple[Any, Callable[[Any], Any]] | None = None
) -> Any:
    """``W + scale B A`` of any library's arrays, with ``dora`` its rows scaled to their magnitudes.

    ``dora`` has these, and what gives the rows' norms, constants to DoRA (arXiv:2402.09353, section 4.3).
    """
    whole = weight + scale * (b @ a)
    if dora is None:
        return whole
    magnitude, norms = dora
    return whole * (magnitude / norms(whole))[:, None]
