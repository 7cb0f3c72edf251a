"""Two steps of a small model in a run's own process groups, beside one process.

It is ``dsx verify`` at another size: the same small config, ranks' job, reference, comparison and words.
Replicas beyond the second or third repeat the data of the first ones, so that the reference stays small.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dsx.checkpoint.formats.huggingface import names
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.config.adapter import peft_settings
from dsx.config.deepspeed import zero_stage
from dsx.config.load import content_of
from dsx.config.run import RunConfig
from dsx.engine.initialize import keep_proof_of
from dsx.engine.zero.building import without_a_trace
from dsx.errors import DsxError, LayoutError
from dsx.hub.model_structure import structure_of, with_weights
from dsx.hub.read import cut_alike
from dsx.launch.entry import AGREED
from dsx.launch.processes import agree
from dsx.models import families
from dsx.models.config_values import at
from dsx.models.custom_code import without_code
from dsx.models.spec import HubModel, Model
from dsx.models.transformers_settings import first_line, quiet_transformers
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import DTYPES
from dsx.parallel.groups import Groups, make_groups
from dsx.parallel.mesh import Mesh
from dsx.train.proof import Proof, keep_proof, layout_words
from dsx.verify.diagnosis import CLIPPING, DTYPE, UNKNOWN, ParityFinding
from dsx.verify.observation import Observations
from dsx.verify.reference import Reference, ReferenceFailedError
from dsx.verify.run import EXACT, VerifyPlan, family_plan, judge, user_job, user_plan
from dsx.verify.shrunk import make_visible, trial
from dsx.verify.subject import NOISE, VerifyJob, observe_pass, user_model
from dsx.waiting import Waiting


@dataclass(frozen=True, slots=True)
class _Way:
    """A setting that does less in parallel.

    Attributes:
        block: The keys of the ``dsx`` block that say it.
        why: What is wrong where this trains right.
    """

    key: str
    value: Any
    block: Mapping[str, Mapping[str, Any]]
    why: str


_ONE_STAGE: Mapping[str, Mapping[str, Any]] = {
    "parallel": {"pipeline": 1, "chunks": 1},
    "schedule": {"name": "auto", "file": None},
    "partition": {"method": "uniform"},
}
_WAYS = (
    _Way(
        "dsx.data.documents",
        "joined",
        {"data": {"documents": "joined"}},
        "the family's blocks let a document of a pack see the others",
    ),
    _Way(
        "dsx.parallel.sequence_parallel",
        False,
        {"parallel": {"sequence_parallel": False}},
        "a block of it mixes tokens outside of the modules that get the whole sequence",
    ),
    _Way(
        "dsx.parallel.context",
        1,
        {"parallel": {"context": 1}},
        "a block of it mixes tokens outside of the modules that see whole sequences",
    ),
    _Way("dsx.parallel.pipeline", 1, _ONE_STAGE, "something is lost or counted twice between the stages"),
    _Way("dsx.parallel.tensor", 1, {"parallel": {"tensor": 1}}, "the tensor plan cuts something wrongly"),
)
"""The cheapest first."""


def prove(config: RunConfig, groups: Groups, *, quiet: bool) -> Proof:
    """Prove a run's layout. A collective call over all ranks, before the run's own model is built.

    What was proved is kept in the user's cache, by config, degrees and versions. Random generators and
    what DeepSpeed counts are afterwards as they were.

    ``quiet``: this rank is not to say that it takes long.

    Raises:
        LayoutError: The small model does not train as one process does; names the tensor, the likely mistake
            and the way out.
    """
    began = time.perf_counter()
    with Waiting("proving the layout on a small model", quiet=quiet, at_once=True), _undisturbed():
        clipping = _CLIP_AT if config.gradient_clipping else 0.0
        found = _tried(config, groups, clipping)
        if isinstance(found, ParityFinding):
            # A router's tie may fall either way; a mistake shows with any weights and tokens, and is named
            # by gradients that are not clipped, unless it is one of clipping.
            other = config.dsx.train.seed + 1
            found = _tried(config, groups, 0.0, other)
            if clipping and not isinstance(found, ParityFinding):
                found = _tried(config, groups, clipping, other)
        if isinstance(found, ParityFinding):
            where = f"{config.model.family} over {layout_words(config.mesh)}"
            what = "a small model of this config does not train here as one process of transformers does"
            of_clipping = clipping if found.cause == CLIPPING else 0.0
            raise _way_out(config, of_clipping, partial(_refusal, where, found, what, _OUT))
    if not found.why_not:
        adapter = config.model.adapter  # what takes another way through the code, and the small model lacks
        quantized = adapter is not None and adapter.quantization != "none"
        lacks = ["dsx.compile"] * (config.dsx.compile != "none") + ["quantization"] * quantized
        lacks += ["pictures"] * config.dsx.data.pictures
        failed = found.without  # perhaps not the next time
        found = replace(found, without=" and ".join(filter(None, [*lacks, _muon(config.deepspeed), failed])))
        if groups.rank == 0 and not failed:
            keep_proof(config, found)
        found = replace(found, seconds=time.perf_counter() - began)
    return found


def _muon(content: Mapping[str, Any]) -> str:
    """What a proof does without under Muon (:func:`dsx.verify.shrunk.make_exact`)."""
    return "Muon" * (str(content["optimizer"]["type"]).lower() == "muon")


def prove_layers(
    make: Callable[[], Mapping[str, Any]],
    config: str | Path | Mapping[str, Any],
    groups: Groups | None = None,
) -> Proof:
    """Prove a pipeline of layers of one's own. A collective call over all ranks, before it is built.

    The layers take two steps as a :class:`dsx.PipelineModule` under the config's ZeRO stage, and are called
    in order in one process beside it, both in fp32. :func:`dsx.initialize` then knows layers of these kinds,
    in this layout, as proved.

    Args:
        make: Returns a dict of PipelineModule's arguments (``layers``, ``loss_fn``, ``num_stages`` ...) and
            ``batch(step, index, size) -> (inputs, labels)``, as ``dsx verify --model`` wants it: of a small
            model, since rank 0 holds it whole.
        config: The DeepSpeed JSON, or its path.
        groups: Process groups of the layout; by default they are made.

    Raises:
        ConfigError: The config has no optimizer.
        LayoutError: The layers do not train as in one process, or ``groups`` are of another layout.
        ModelError: ``make`` returns something else.
    """
    content = content_of(config, ())
    on_cpu = get_accelerator().device_name() == "cpu"
    job, _ = user_job(content, dist.get_world_size(), make, keep=False, on_cpu=on_cpu)
    mesh = job.mesh()
    groups = groups or make_groups(mesh)
    if groups.mesh != mesh:
        raise LayoutError(
            f"dsx.prove over {layout_words(groups.mesh)}",
            f"num_stages = {mesh.pp} of the layers makes it {layout_words(mesh)}",
            "give groups of that layout, or none; layers with tensor or context parallelism cannot be proved",
        )
    began, where = time.perf_counter(), f"the layers over {layout_words(mesh)}"
    with _undisturbed():
        found = _compared(job, groups, where, lambda: user_plan(job, user_model(make)))
    if isinstance(found, ParityFinding):
        what = "the layers do not train here as in one process"
        raise _agreed(_refusal(where, found, what, _OUT_OF_LAYERS))
    if groups.rank == 0 and not found.why_not:
        keep_proof_of(user_model(make).arguments["layers"], mesh, zero_stage(content))
    found = replace(found, without=_muon(content_of(config, ())))
    return replace(found, seconds=time.perf_counter() - began)


def _tried(
    config: RunConfig, groups: Groups, clipping: float = 0.0, seed: int | None = None
) -> Proof | ParityFinding:
    """Train the small model of a config two steps in ``groups``, and compare it on rank 0."""
    try:
        job = agree(lambda: _job(config, clipping, seed))
    except DsxError as error:
        return Proof(
            layout=layout_words(config.mesh), why_not=f"no small model of it can be made ({error.what})"
        )
    one, small, tensor = config.model, job.config().model, config.mesh.tp
    if tensor > 1 and isinstance(one, HubModel) and isinstance(small, HubModel) and not cut_alike(one, small):
        what = "the tensor plan of the small model is another than the run's"
        raise LayoutError(at("dsx.parallel.tensor", tensor), what, f"use 1; {_OUT}")
    return _job_tried(job, config, groups)


def _job_tried(job: VerifyJob, config: RunConfig, groups: Groups) -> Proof | ParityFinding:
    where = f"{config.model.family} over {layout_words(groups.mesh)}"
    with ExitStack() as held:
        job, built, lacks = _at_adapters_start(job, config, held)

        def plan(*, layers: bool = False) -> VerifyPlan:
            made = family_plan(job, job.config(), layers=layers)
            loosely = replace(EXACT, weight=EXACT.gradient)  # of singular vectors
            bench = replace(made.bench, built=built, tolerances=loosely) if built else made.bench
            return replace(made, bench=bench)

        def also(made: VerifyPlan) -> ParityFinding | str:
            try:
                return _buffer_finding(job.config().model, made.bench.reference, DTYPES[config.precision])
            except DsxError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the family's code does in that data type
                return f"buffers' data types ({first_line(error)})"

        found = _compared(job, groups, where, plan, partial(plan, layers=True), also)
    if isinstance(found, ParityFinding):
        return found
    return replace(found, without=" and ".join(filter(None, [lacks, found.without])))


def _buffer_finding(model: Model, reference: Reference, dtype: torch.dtype) -> ParityFinding | str:
    """The finding for a buffer of a block in another data type than from_pretrained gives it in the run's."""
    if not isinstance(model, HubModel) or dtype is torch.float32:
        return ""
    whole, blocks = cast("Any", reference).whole, structure_of(model.config).blocks
    if not any(each.is_floating_point() for each in whole.get_submodule(blocks).buffers()):
        return ""
    with quiet_transformers():
        given = {"config": copy.deepcopy(whole.config), "state_dict": whole.state_dict(), "dtype": dtype}
        theirs = type(whole).from_pretrained(None, **given).get_submodule(blocks)
    layers = families.layers(model, TensorParallel(), dtype=dtype, device="meta")
    for number, block in enumerate(theirs, model.kinds.index("Block")):
        own = dict(layers[number].build().named_buffers())
        for name, wanted in block.named_buffers():
            found, tensor = own[f"block.{name}"].dtype, f"{number}.block.{name}"
            if found != wanted.dtype:
                what = f"{tensor} is {found} where from_pretrained makes it {wanted.dtype}"
                why = "a buffer is cast with the weights and should not be, or the other way round"
                return ParityFinding(cause=DTYPE, what=what, why=why, step=0, tensor=tensor)
    return ""


def _compared(
    job: VerifyJob,
    groups: Groups,
    where: str,
    plan: Callable[[], VerifyPlan],
    thorough: Callable[[], VerifyPlan] | None = None,
    also: Callable[[VerifyPlan], ParityFinding | str] = lambda _: "",
) -> Proof | ParityFinding:
    """Compare a job's step with ``plan``, then, if it differs, with ``thorough``, which tells more.

    ``also``: What else differs, where the step does not, or what cannot be looked at.
    """
    with _steps(where, "a small model of it does not take a step", plan):
        seen = observe_pass(job, replace(groups, island=None, silent=True), job.clipping)  # of one island

    def judged() -> Proof | ParityFinding:
        assert seen is not None, "this is rank 0"
        observed = Observations(passes=[seen])
        findings: tuple[ParityFinding, ...] = ()
        for each in filter(None, (plan, thorough)):
            with _steps(where, _NO_BENCH):
                made = each()
            with _steps(where, _NOT_ALONE):
                verdict = judge(made, observed)
            findings = (*verdict.findings, *findings)
            if not findings:
                break
        # Where one process overflows too, once it has taken a step, it is the learning rate's doing.
        if findings and not (findings[0].step > 1 and findings[0].what.startswith("in one process,")):
            return findings[0]
        if isinstance(other := also(made), ParityFinding):
            return other
        rows = verdict.rows
        norms = [_off(row.norm, row.expected_norm) for row in rows if row.norm is not None]
        return Proof(
            layout=layout_words(groups.mesh),
            loss=max(_off(row.loss, row.expected_loss) for row in rows),
            norm=max(norms, default=None),
            gradient=max(row.gradient for row in rows),
            without=other,
        )

    return agree(judged)


_NO_BENCH = "what a small model of it is to be compared with cannot be made"
_NOT_ALONE = "a small model of it does not train in one process either"


@contextmanager
def _steps(where: str, what: str, plan: Callable[[], VerifyPlan] | None = None) -> Iterator[None]:
    """End the run with one error for what a model's code raises; by the reference's, if that fails too."""
    try:
        yield
    except ReferenceFailedError as error:
        raise ReferenceFailedError(error.where, error.what, _OUT) from error
    except DsxError:
        raise
    except Exception as error:
        if plan is not None:
            with _steps(where, what):
                bench = plan().bench
            with _steps(where, _NOT_ALONE):
                bench.reference.evaluate(bench.reference.weights(), bench.batches(0))
        raise LayoutError(where, f"{what} ({first_line(error)})", _OUT) from error


def _off(seen: float, expected: float) -> float:
    return abs(seen - expected) / max(abs(expected), 1e-30)


_OUT = (
    '`dsx verify CONFIG --gpus N` tells more; {"dsx": {"proof": "off"}} trains it all the same, to results '
    "that nothing vouches for"
)


_CLIP_AT = 0.01
"""Below a small model's norm, so that clipping is at work where the run's own may never be."""


def _job(config: RunConfig, clipping: float, seed: int | None) -> VerifyJob:
    """The ranks' job, whose config is known to be right."""
    content = trial(config, on_cpu=get_accelerator().device_name() == "cpu").content
    content["dsx"]["compile"] = "none"
    make_visible(content, clipping)
    for part in ("offload_param", "offload_optimizer"):
        where = content.get("zero_optimization", {}).get(part)
        if isinstance(where, dict) and where.get("device") == "nvme":
            content["zero_optimization"][part] = {"device": "cpu"}
    if seed is not None:
        content["dsx"]["train"]["seed"] = seed
    # A parameter that was kept from the step before, or a gradient that was, shows in the second.
    job = VerifyJob(content=content, world_size=config.mesh.size, steps=2, clipping=clipping)
    return replace(job, distinct=_distinct(job.config().mesh))


def _distinct(mesh: Mesh) -> int:
    """How many replicas see data of their own: as few as show a mistake in what replicas do together."""
    return next((number for number in (2, 3) if mesh.num_shares % number == 0), 1)


_OUT_OF_LAYERS = "give every layer the same input and weights on all ranks; `dsx verify --model` tells more"


def _refusal(where: str, found: ParityFinding, what: str, fix: str, way: _Way | None = None) -> LayoutError:
    """The end of a run that would train something else, in the words of ``dsx verify``."""
    why = found.why if way is None or found.cause != UNKNOWN else way.why
    if way is not None:
        fix = f"set {way.key} to {json.dumps(way.value)}, with which it trains right; {fix}"
    return LayoutError(where, f"{what}. {found.cause}: {found.what}. Likely: {why}", fix)


def _way_out(config: RunConfig, clipping: float, refusal: Callable[..., LayoutError]) -> LayoutError:
    """The refusal, with the nearest setting that a small model trains right with. Collective."""
    for way in _WAYS:
        job = agree(partial(_changed, config, clipping, way.block))
        if job is None:
            continue
        other = replace(make_groups(job.mesh(), sequence_parallel=job.sequence_parallel), island=None)
        try:
            found = _job_tried(job, config, other)
        except DsxError as error:
            if AGREED not in getattr(error, "__notes__", ()):
                return refusal()  # the other ranks wait for this one, which ends the run
            continue
        if isinstance(found, Proof):
            return _agreed(refusal(way))
    return _agreed(refusal())


def _agreed(error: LayoutError) -> LayoutError:
    error.add_note(AGREED)
    return error


def _changed(
    config: RunConfig, clipping: float, changes: Mapping[str, Mapping[str, Any]]
) -> VerifyJob | None:
    """The job of a config with other settings; None if it has these already, or cannot have them."""
    job = _job(config, clipping, None)
    given = copy.deepcopy(dict(job.content))
    for block, values in changes.items():
        given["dsx"][block] |= values
    changed = replace(job, content=given, resolved={})
    try:
        before, after = job.config(), changed.config()
    except DsxError:
        return None
    said = [
        (each.mesh, each.dsx.parallel.sequence_parallel, each.dsx.data.keeps_apart)
        for each in (before, after)
    ]
    if said[0] == said[1]:
        return None
    return replace(changed, distinct=_distinct(after.mesh))


_CUDNN, _ONEDNN = cast("Any", torch.backends.cudnn), cast("Any", torch.backends.mkldnn)
_PRODUCTS: tuple[Any, ...] = (
    torch.backends, torch.backends.cuda.matmul, _CUDNN, _CUDNN.conv, _CUDNN.rnn, _ONEDNN, _ONEDNN.matmul,
)  # fmt: skip
"""What may compute fp32's products in TF32 or bf16, as TrainingArguments(tf32=True) asks for."""


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random states, precisions and DeepSpeed's counters after the block."""
    device = get_accelerator()
    own = [] if device.device_name() == "cpu" else [device.current_device()]
    numbers, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - that of everybody
    precisions, threads = [each.fp32_precision for each in _PRODUCTS], torch.get_num_threads()
    with ExitStack() as states:
        states.enter_context(torch.random.fork_rng(devices=own, device_type=device.device_name()))
        states.enter_context(without_a_trace())
        for each in _PRODUCTS:
            each.fp32_precision = "ieee"
        torch.set_num_threads(1)  # more cost more than they give in operations of microseconds
        try:
            yield
        finally:
            for each, precision in zip(_PRODUCTS, precisions, strict=True):
                each.fp32_precision = precision
            torch.set_num_threads(threads)
            random.setstate(numbers)
            np.random.set_state(numpy_state)  # noqa: NPY002


def _at_adapters_start(
    job: VerifyJob, config: RunConfig, held: ExitStack
) -> tuple[VerifyJob, dict[str, Tensor], str]:
    """A job at its adapter's start, if that changed the base. A collective call over all ranks.

    Returns the job, whose files are this rank's own until ``held`` ends, its weights, and what it does
    without, where a rank can make or write no such start.
    """
    start = "none" if config.model.adapter is None else config.model.adapter.start
    if start == "none":
        return job, {}, ""
    files, built, why = agree(partial(_made, job, start))
    if not why:
        try:
            changed = _reading(job, files, held.enter_context(TemporaryDirectory()))
        except OSError as error:
            why = first_line(error)
        said = [why] * dist.get_world_size()
        dist.all_gather_object(said, why)
        if not (why := next(filter(None, said), "")):
            return changed, built, ""
    return job, {}, f"the adapter's start ({why})"


def _made(job: VerifyJob, start: str) -> tuple[dict[str, bytes], dict[str, Tensor], str]:
    """What :func:`_made_by_peft` gives, or why it gives nothing."""
    try:
        return *_made_by_peft(job, start), ""
    except DsxError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever this PEFT, or none, does on this machine
        return {}, {}, first_line(error)


def _made_by_peft(job: VerifyJob, start: str) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """Folders of a job's model and of an adapter on it, and the weights that a layout then begins with."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    config, found = job.config(), dict[str, Tensor]()
    with TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), quiet_transformers():
        model = with_weights(without_code(config.hf_config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOISE * torch.randn(parameter.shape) * (parameter.ndim == 1))
        model.save_pretrained(Path(folder) / "model")
        told = peft_settings(config.param_specs, config.model, None)
        told |= {"inference_mode": False, "init_lora_weights": start}
        made = get_peft_model(model, LoraConfig(**told))
        made.save_pretrained(Path(folder) / "adapter", save_embedding_layers=False)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    for name, values in made.get_base_model().state_dict().items():
        found[name.replace(".base_layer", "").replace(".modules_to_save.default", "")] = values
    found |= get_peft_model_state_dict(made, save_embedding_layers=False)

    def held(spec: Any) -> Tensor:
        whole = hf.join(spec, lambda own: next(found[n] for n in names.stored_names(spec, own) if n in found))
        assert whole is not None
        return whole.detach().clone()

    specs = config.param_specs
    return files, {spec.name: held(spec if spec.adapts else names.in_memory(spec)) for spec in specs}


def _reading(job: VerifyJob, files: Mapping[str, bytes], folder: str) -> VerifyJob:
    """The job on these files, which are written into a folder of this rank's own."""
    for name, file in files.items():
        (Path(folder) / name).parent.mkdir(exist_ok=True)
        (Path(folder) / name).write_bytes(file)
    content = copy.deepcopy(dict(job.content))
    model = {"path": f"{folder}/model", "weights": "load"}
    model |= {key: content["dsx"]["model"][key] for key in ("implementation", "vocab_multiple")}
    content["dsx"] |= {"model": model, "adapter": {"path": f"{folder}/adapter"}}
    return replace(job, content=content, resolved={})
