"""One family trained by dsx in a layout, beside one process of transformers with torch's AdamW.

Both start from the same folder and take the same micro-batches. Compared are the loss and the gradient norm
of every step, the exported folder with the one that transformers writes, tensor by tensor and by its names,
and the logits of the model that ``from_pretrained`` makes of it. A small random model may be so steep that
roundings alone move these further than is allowed. What they move is measured: one process trains a second
time from weights that are a rounding away.
"""

from __future__ import annotations

import copy
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from all_families import tiny

from dsx.errors import DsxError
from dsx.launch.local_ranks import RankError, run_ranks

STEPS = 3
ROWS = 2  # of a micro-batch
MICRO_BATCHES = 4  # of a step, over all replicas
CLIPPING = 0.02  # below every norm of these runs: the reference looks
# With the usual eps of 1e-8 the first update, lr * g / (|g| + eps), is a coin toss wherever |g| is near the
# rounding of a sum in another order.
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01}
TOLERANCE = 1e-5
LOGIT_TOLERANCE = 1e-4
ROUNDINGS = 4  # that a layout's sums may lie apart
PRELOAD = (
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "dsx.train.recipe",
    "dsx.checkpoint.run.export",
)

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is trained."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    zero: int
    schedule: str = "auto"
    sequence_parallel: bool = False
    context_method: str = "auto"
    recompute: str = "none"

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def with_whole_sequences(self) -> Layout:
        """The same without sequence parallelism."""
        return replace(self, sequence_parallel=False)

    def __str__(self) -> str:
        named = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("cp", self.cp), ("ep", self.ep))
        degrees = [f"{name} {n}" for name, n in named if n > 1]
        parts = [
            " x ".join(degrees) or "one rank",
            f"{self.chunks} chunks" * (self.chunks > 1),
            self.schedule * (self.schedule != "auto"),
            f"ZeRO-{self.zero}",
            self.context_method * (self.context_method != "auto"),
            f"recompute {self.recompute}" * (self.recompute != "none"),
        ]
        return ", ".join(filter(None, parts))


LAYOUTS = {
    "tp": Layout(tp=2, zero=1),
    "pp": Layout(pp=2, chunks=2, zero=2, schedule="interleaved"),
    "dp": Layout(dp=2, zero=3),
    "tp-pp": Layout(tp=2, pp=2, zero=3),
    "zb": Layout(tp=2, pp=2, zero=1, schedule="zb_h1", sequence_parallel=True),
    "cp-pp": Layout(cp=2, pp=2, zero=2),
    "ep": Layout(dp=2, ep=2, zero=2),
}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process of transformers gives, and what dsx says to the family before it trains.

    Attributes:
        losses: Of each step, the mean over its micro-batches.
        norms: Of each step, before clipping.
        allowed: How far a layout may be from losses, norms and logits, relative.
        kind: "dense", "MoE", "hybrid" or "hybrid, MoE".
        parameters: Number of them.
    """

    losses: list[float]
    norms: list[float]
    allowed: dict[str, float]
    kind: str
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What dsx makes of the family's config before it starts anything.

    Attributes:
        refused: Layout -> why dsx does not take it.
        whole: Modules whose matrices tensor parallelism leaves whole, by their names in a block.
        whole_share: Share of the parameters that those are.
    """

    refused: dict[Layout, str]
    whole: list[str]
    whole_share: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What dsx gives."""

    losses: list[float]
    norms: list[float]


def dsx_config(layout: Layout, model: Path | Mapping[str, Any], implementation: str) -> Json:
    """The JSON that a user would write, for a model folder or the content of its config.json."""
    source = {"path": str(model)} if isinstance(model, Path) else {"config": dict(model)}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES // layout.dp,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": layout.zero},
        "optimizer": {
            "type": "AdamW",
            "params": {**ADAMW, "betas": list(ADAMW["betas"]), "torch_adam": True},
        },
        "dsx": {
            "model": {**source, "implementation": implementation, "vocab_multiple": 8},
            "parallel": {
                "tensor": layout.tp,
                "pipeline": layout.pp,
                "context": layout.cp,
                "context_method": layout.context_method,
                "expert": layout.ep,
                "chunks": layout.chunks,
                "sequence_parallel": layout.sequence_parallel,
            },
            "schedule": {"name": layout.schedule},
            "recompute": layout.recompute,
            "data": {"source": "own", "sequence_length": tiny.SEQUENCE},
            "train": {"steps": STEPS, "output": "unused"},
        },
    }


def micro_batches(step: int) -> Iterator[tuple[Any, Any]]:
    """Inputs and labels of every micro-batch of a step, int64 [ROWS, SEQUENCE]."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(tiny.VOCABULARY, (ROWS, tiny.SEQUENCE + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def reference(
    _rank: int, _world_size: int, family: str, folder: Path, *, attention: str | None = None, **changes: Any
) -> Reference:
    """Make the model, save it in ``folder/model``, train it, save it in ``folder/trained``. On one rank.

    ``attention`` is transformers' ``attn_implementation``, ``changes`` are to the family's config.
    """
    described = (
        tiny.tiny_composite(family) if tiny.is_composite(family) else tiny.tiny_config(family, **changes)
    )
    made = random_model(described)
    made.save_pretrained(folder / "model")
    model, _ = read_model(folder / "model", attention)
    for name, parameter in made.named_parameters():  # what a class makes fixed, reading makes free
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    model.save_pretrained(folder / "model")  # one family makes padding's row zero whenever it is read
    rounded = _rounded(model)
    losses, norms, logits = _trained(model)
    assert min(norms) > CLIPPING, f"clipping is not at work: norms {norms}"
    model.save_pretrained(folder / "trained")
    others = _trained(rounded)
    away = float((logits - others[2]).abs().max() / logits.abs().max())
    return Reference(
        losses=losses,
        norms=norms,
        allowed={
            "losses": max(TOLERANCE, ROUNDINGS * furthest(losses, others[0])),
            "norms": max(TOLERANCE, ROUNDINGS * furthest(norms, others[1])),
            "logits": max(LOGIT_TOLERANCE, ROUNDINGS * away),
        },
        kind=_kind(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def furthest(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(some, others, strict=True))


def _rounded(model: Any) -> Any:
    """A copy with weights that are about a rounding of float32 away."""
    import torch

    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(19)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 2**-23 * torch.randn(parameter.shape, generator=generator))
    return other


def _trained(model: Any) -> tuple[list[float], list[float], Any]:
    """Train in this process: losses, norms, and the logits afterwards."""
    import torch

    # torch's AdamW passes over a parameter that no loss reaches; in DeepSpeed's flat partitions it decays.
    for parameter in filter(lambda one: one.requires_grad, model.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for inputs, labels in micro_batches(step):
            loss = logits_and_loss(model, inputs, labels)[1] / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
    return losses, norms, _logits(model)


def logits_and_loss(model: Any, inputs: Any, labels: Any) -> tuple[Any, Any]:
    """Float32 logits, and the loss that transformers trains by, with that of routers where it has one."""
    import torch.nn.functional as F

    out = model(input_ids=inputs, use_cache=False)
    logits, routers = out.logits.float(), getattr(out, "aux_loss", None)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return logits, loss if routers is None else loss + model.router_aux_loss_coef * routers


def random_model(config: Any) -> Any:
    """A causal language model with no parameter and no saved buffer at zero or one."""
    import torch
    from transformers import PreTrainedModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(17)
    model = _auto_class(config.model_type).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(18)
    saved = model.state_dict()
    with torch.no_grad():
        for name, tensor in saved.items():
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
                assert tensor.isfinite().all(), f"{name} is not finite"
    if tiny.is_composite(config.model_type):  # the tower is frozen, the language model and its head are not
        model.requires_grad_(requires_grad=False)
        model.get_decoder().requires_grad_()
        heads = (
            each.get_output_embeddings() for each in model.modules() if isinstance(each, PreTrainedModel)
        )
        next(head for head in heads if head is not None).requires_grad_()  # some have it inside
    return model


def _auto_class(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    return tiny.composite_class(family) or AutoModelForCausalLM


def read_model(folder: Path, attention: str | None = None) -> tuple[Any, Json]:
    """The model of a folder as its users read it, and what transformers says of the folder."""
    import torch
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = _auto_class(AutoConfig.from_pretrained(folder).model_type)
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    return model, info


def _logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        model.eval()
        return model(input_ids=next(micro_batches(STEPS))[0], use_cache=False).logits


_RECURRENT = re.compile(r"mamba|linear_attn|conv|A_log|recurrent|time_mix|time_decay|mlstm")


def _kind(model: Any) -> str:
    """By what stands in the layers: nothing in a config says so for every family."""
    names = [name for name, _ in model.named_parameters()]
    types = {*(getattr(model.config, "layer_types", None) or ())}
    attention = any("attention" in type(module).__name__.lower() for module in model.modules())
    recurrent = types & {"linear_attention", "conv", "recurrent"} or any(map(_RECURRENT.search, names))
    experts = any("experts" in name for name in names)
    mixer = ("hybrid" if attention else "recurrent") if recurrent else ""
    return ", ".join(filter(None, (mixer, "MoE" * experts))) or "dense"


def resolved(
    _rank: int, _world_size: int, folder: Path, implementation: str, layouts: Mapping[str, Layout] = LAYOUTS
) -> Resolved:
    """Have dsx read its config for every layout, with its sequence parallelism and without. On one rank."""
    import dsx

    refused, whole, share = {}, set(), 0.0
    for layout in {each for one in layouts.values() for each in (one, one.with_whole_sequences)}:
        try:
            config = dsx.load_config(dsx_config(layout, folder, implementation), world_size=layout.world_size)
            dsx.recipe.require_right_layers(config)
        except DsxError as error:
            refused[layout] = reason_of(error)
            continue
        if layout.tp > 1 and not layout.sequence_parallel:
            kept = [spec for spec in config.param_specs if spec.split is None and len(spec.shape) > 1]
            whole = {re.sub(r"^\d+\.(block\.)?|\.weight$", "", spec.name) for spec in kept}
            share = sum(s.numel for s in kept) / sum(spec.numel for spec in config.param_specs)
    return Resolved(refused=refused, whole=sorted(whole), whole_share=share)


def train(
    rank: int, _world_size: int, layout: Layout, model: Path, export: Path, implementation: str
) -> Trained | None:
    """Train as a recipe does and export; rank 0 gives the figures."""
    import dsx
    from dsx.launch.processes import seed_generators
    from dsx.parallel.groups import make_groups

    config = dsx.load_config(dsx_config(layout, model, implementation), world_size=layout.world_size)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    seed_generators(groups, config.dsx.train.seed)
    engine, *_ = dsx.initialize(model=dsx.recipe.build_model(config, groups), config=config)
    losses, norms = [], []
    for step in range(STEPS):
        mine = list(micro_batches(step))[groups.dp_rank :: layout.dp]
        losses.append(float(engine.train_batch(iter(mine))))
        norms.append(float(engine.get_global_grad_norm()))
    dsx.export_hf(engine, export)
    return Trained(losses=losses, norms=norms) if rank == 0 else None


def exported_differences(
    _rank: int, _world_size: int, folder: Path, export: Path, logits: float
) -> list[str]:
    """What an exported folder has otherwise than the one that transformers wrote. On one rank.

    ``logits``: how far those of the models that are read may be apart, relative.
    """
    import torch

    expected, found = _tensors(folder / "trained"), _tensors(export)
    said = [
        f"{what} {', '.join(sorted(names)[:3])} ({len(names)} of {len(expected)} names)"
        for what, names in (("lacks", expected.keys() - found), ("has besides", found.keys() - expected))
        if names
    ]
    away = {}
    for name in expected.keys() & found:
        mine, theirs = found[name], expected[name]
        if mine.shape != theirs.shape:
            said.append(f"{name} has shape {list(mine.shape)}, {list(theirs.shape)} in transformers")
        elif not torch.allclose(mine.float(), theirs.float(), rtol=0, atol=TOLERANCE):
            away[name] = float((mine.float() - theirs.float()).abs().max())
    if away:
        worst = ", ".join(f"{name} by {away[name]:.1e}" for name in sorted(away, key=away.get)[::-1][:3])
        said.append(f"weights differ: {worst} ({len(away)} of {len(expected)})")
    model, info = read_model(export)
    said += [
        f"from_pretrained says {key}: {sorted(map(str, names))[:3]}" for key, names in info.items() if names
    ]
    theirs = _logits(read_model(folder / "trained")[0])
    away_by = float((_logits(model) - theirs).abs().max())
    if not away_by <= logits * float(theirs.abs().max()):
        said.append(f"logits of the model read back differ by {away_by:.1e}")
    return said


def prove(
    family: str,
    layouts: Sequence[str] | Mapping[str, Layout],
    *,
    folder: Path,
    implementation: str = "transformers",
    timeout_seconds: float = 120.0,
) -> Iterator[tuple[str, Json]]:
    """Train one family in some layouts, those of :data:`LAYOUTS` or others, each in ranks of its own.

    Yields:
        First ``("", facts of the family)``, with ``failed`` if transformers itself did not get through, then
        for each layout its name with ``result`` ("ok", "refused", "failed", or "none" where a family without
        experts has nothing to lay over ranks), ``reason``, ``seconds``, the largest differences that were
        found, and of a failure the end of the ``trace``.
    """
    run = partial(_run, timeout_seconds=timeout_seconds)
    named = layouts if isinstance(layouts, Mapping) else {name: LAYOUTS[name] for name in layouts}
    try:
        expected: Reference = run(reference, 1, family, folder)[0]
    except RankError as error:
        yield "", {"failed": reason(error), "trace": error.said[-_TRACE:]}
        return
    facts = {"kind": expected.kind, "parameters": expected.parameters}
    try:
        before: Resolved = run(resolved, 1, folder / "model", implementation, named)[0]
    except RankError as error:
        yield "", {**facts, "whole": [], "whole_share": 0.0}
        for name in named:
            yield name, {**_broken(error), "seconds": 0.0}
        return
    yield "", {**facts, "whole": before.whole, "whole_share": before.whole_share}

    def case(layout: Layout) -> Json:
        if layout.ep > 1 and "MoE" not in expected.kind:
            return {"result": "none"}
        if layout in before.refused:
            return {"result": "refused", "reason": before.refused[layout]}
        return _case(run, layout, expected, folder, implementation)

    for name, layout in named.items():
        began = time.monotonic()
        outcome = case(layout)
        if layout.sequence_parallel and outcome["result"] != "ok":
            outcome = {**outcome, "without_sequence_parallelism": case(layout.with_whole_sequences)}
        yield name, {**outcome, "seconds": round(time.monotonic() - began, 1)}


_TRACE = 4000


def _run(function: Any, world_size: int, *args: Any, timeout_seconds: float) -> list[Any]:
    return run_ranks(function, world_size, *args, timeout_seconds=timeout_seconds, preload=PRELOAD)


def _case(run: Any, layout: Layout, expected: Reference, folder: Path, implementation: str) -> Json:
    export = folder / f"{layout}, sequence parallel {layout.sequence_parallel}"
    try:
        found: Trained = run(train, layout.world_size, layout, folder / "model", export, implementation)[0]
        said = run(exported_differences, 1, folder, export, expected.allowed["logits"])[0]
    except RankError as error:
        late = "refused only once its ranks ran: " if isinstance(error.error, DsxError) else ""
        return _broken(error, late)
    finally:
        shutil.rmtree(export, ignore_errors=True)
    away = {key: furthest(getattr(found, key), getattr(expected, key)) for key in ("losses", "norms")}
    said = [
        f"{what} differ by {by:.1e}" for what, by in away.items() if not by <= expected.allowed[what]
    ] + said
    outcome = {"result": "failed" if said else "ok", **away}
    return outcome | ({"reason": "; ".join(said)} if said else {})


def _broken(error: RankError, late: str = "") -> Json:
    return {"result": "failed", "reason": late + reason(error), "trace": error.said[-_TRACE:]}


def reason(error: RankError) -> str:
    """The error in a line, with the innermost place in dsx, transformers or here that it came from."""
    if isinstance(error.error, DsxError):
        return reason_of(error.error)
    if error.kind != "raised":
        return str(error).splitlines()[0]
    frames = re.findall(r'File "[^"]*/((?:dsx|transformers|tools)/[^"]+)", line (\d+)', error.said)
    lines = [
        line
        for line in error.said.splitlines()
        if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)?:", line)
    ]
    place = f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""
    return (lines[-1] if lines else error.said.strip().splitlines()[-1])[:400] + place


def reason_of(error: DsxError) -> str:
    """Where and what, without the folder of this run."""
    return re.sub(r"\S*/(?=model/)", "", f"{error.where}: {error.what}")


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
