"""What ranks do: build what is to be verified, watch it while it trains, and return what it did."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsx.checkpoint.formats import slices
from dsx.checkpoint.run.names import spec_of
from dsx.config.batch import Batch, resolve_batch
from dsx.config.resolve import RunConfig, resolve
from dsx.config.schema import OWN
from dsx.config.user_function import user_function
from dsx.engine.initialize import initialize
from dsx.engine.pipeline_module import PipelineModule
from dsx.engine.zero.master_shards import master_shards
from dsx.errors import ModelError
from dsx.models.param import ParamSpec
from dsx.nn.documents import MicroBatch
from dsx.nn.dropout import Dropout
from dsx.parallel.groups import Groups, of_experts
from dsx.parallel.mesh import Mesh
from dsx.train.building import build_layers
from dsx.verify.observation import (
    Mask,
    Observations,
    ObservedShard,
    RankObservation,
    RankStep,
    RunObservation,
    TensorInfo,
    Weight,
)

Batches = Callable[[int], Iterator[tuple[Any, Any]]]
"""Step -> this replica's micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine to watch.

    Attributes:
        engine: With ``train_batch`` and ``get_global_grad_norm``: dsx's, or stock DeepSpeed's.
        module: This rank's layers; children with a number for a name are layers.
        parameters: This rank's parameters by logical name.
        data: Ranks that hold the same parameters.
    """

    engine: Any
    inner: Any
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    built: dict[str, Tensor]
    groups: Groups
    data: dist.ProcessGroup


def observe_steps(subject: Subject, batches: Batches, steps: int) -> RankObservation:
    """Train ``steps`` steps and record everything. A collective call over all ranks."""
    watch = _Watch(subject)
    weights, biases, seen = [watch.weights()], [watch.biases()], []
    outputs: dict[str, Tensor] = {}
    for step in range(steps):
        whole = subject.groups.replica == 0 and subject.groups.mesh.cp == 1  # else they are of parts of rows
        with watch.outputs(outputs) if step == 0 and whole else nullcontext():
            seen.append(watch.step(batches(step)))
        norm = seen[-1].norm
        if norm is not None and not math.isfinite(norm):  # on all ranks
            seen[-1] = replace(seen[-1], not_finite=watch.not_finite(batches(step)))
        weights.append(watch.weights())
        biases.append(watch.biases())
    known = {
        name: TensorInfo(
            shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),
            spec=getattr(parameter, "dsx_spec", None),
            copy=bool(getattr(parameter, "ds_pipe_replicated", False)),
        )
        for name, parameter in subject.parameters.items()
    }
    return RankObservation(
        rank=subject.groups.rank,
        known=known,
        built=subject.built,
        weights=weights,
        biases=biases,
        steps=seen,
        outputs=outputs,
    )


class _Watch:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._names = {id(parameter): name for name, parameter in subject.parameters.items()}
        self._given: dict[int, tuple[Tensor, Tensor | None]] = {}
        wrapper = subject.inner.optimizer
        # torch's own hook: whatever DeepSpeed wraps around it, this is the optimizer that moves the weights.
        getattr(wrapper, "optimizer", wrapper).register_step_pre_hook(self._before_step)
        self._partitioned = subject.inner.zero_optimization_stage() > 0

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for master in group["params"]:
                gradient = None if master.grad is None else _copy(master.grad)
                self._given[id(master)] = _copy(master), gradient

    def step(self, batches: Iterator[tuple[Any, Any]]) -> RankStep:
        subject = self._subject
        self._given.clear()
        loss = float(subject.engine.train_batch(batches))
        known = getattr(subject.inner.optimizer, "compute_grad_norm", True)
        norm = subject.engine.get_global_grad_norm() if known else None
        pieces, spread = [], {}
        for kept in master_shards(subject.inner):
            before, gradient = self._given.get(id(kept.master), (_copy(kept.master), None))
            after = _copy(kept.master)
            for span in kept.spans:
                name, at = (
                    self._names[id(span.parameter)],
                    slice(span.offset, span.offset + span.stop - span.start),
                )
                own = None if gradient is None else gradient[at]
                if not self._partitioned:
                    spread[name] = self._spread(after[at] if own is None else own, span.parameter)
                if self._partitioned or subject.groups.is_first_of(span.parameter):
                    pieces.append(
                        ObservedShard(
                            name=name, start=span.start, before=before[at], after=after[at], gradient=own
                        )
                    )
        return RankStep(loss=loss, norm=None if norm is None else float(norm), pieces=pieces, spread=spread)

    def not_finite(self, batches: Iterator[tuple[Any, Any]]) -> list[str]:
        """The tensors whose gradients are not finite in a step, which DeepSpeed then skips.

        Hooks on parameters tell. A run has none, and a backward in two parts goes another way with them: so
        it is a step by itself.
        """
        bad: dict[str, None] = {}

        def hook(name: str) -> Callable[[Tensor | None], None]:
            def note(gradient: Tensor | None) -> None:
                if gradient is not None and not gradient.isfinite().all():
                    bad[name] = None

            return note

        parameters = self._subject.parameters.items()
        handles = [each.register_hook(hook(name)) for name, each in parameters if each.requires_grad]
        self._subject.engine.train_batch(batches)
        for handle in handles:
            handle.remove()
        return [*bad]

    def weights(self) -> dict[str, Weight]:
        """Every weight as the model computes with it."""
        found = {}
        for name, parameter in self._subject.parameters.items():
            gathered: Any = nullcontext()
            if hasattr(parameter, "ds_id"):
                gathered = deepspeed.zero.GatheredParameters([parameter])
            with gathered:
                values = parameter.detach().float().cpu().clone()
            spread = self._spread(values, parameter)
            if self._subject.groups.is_first_of(parameter):
                found[name] = Weight(values=values, spread=spread)
        return found

    def biases(self) -> dict[str, Tensor]:
        load = getattr(self._subject.engine, "expert_load", None)
        return (
            {name: each.float().to("cpu", copy=True) for name, each in load.biases().items()} if load else {}
        )

    def _spread(self, values: Tensor, parameter: nn.Parameter) -> float:
        """The largest difference between data-parallel ranks, each of which has all of ``values``."""
        subject = self._subject
        group = subject.groups.replicas_of(parameter) if of_experts(parameter) else subject.data
        if not values.numel() or dist.get_world_size(group) == 1:
            return 0.0
        ends = torch.stack((values, -values)).to(subject.inner.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        return float((ends[0] + ends[1]).abs().max())

    @contextmanager
    def outputs(self, into: dict[str, Tensor]) -> Iterator[None]:
        """Record the first output of every layer that is a module of its own, unless it is the loss."""

        def hook(name: str) -> Callable[..., None]:
            def note(_module: Any, _inputs: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                kept = isinstance(first, Tensor) and first.is_floating_point()
                if name not in into and kept and first.dim():  # no loss, which a head may have computed
                    into[name] = _copy(first).view(first.shape)

            return note

        children = self._subject.module.named_children()
        handles = [child.register_forward_hook(hook(name)) for name, child in children if name.isdigit()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _copy(tensor: Tensor) -> Tensor:
    """A flat float32 copy on the host, with memory of its own."""
    return tensor.detach().float().reshape(-1).to("cpu", copy=True)


NOISE = 0.1
"""Fresh norms, biases and adapters are moved by so much, because at exactly 1 and 0 they hide mistakes."""

_SHARES = 4  # micro-batches train a quarter, two quarters, three and all of their labels, in turns
_BEGINS = 0.3  # the share of tokens that begin a document, where documents are kept apart


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob:
    """The job of the ranks.

    Attributes:
        content: DeepSpeed's JSON, with its ``dsx`` block unless there is an ``entry``.
        clipping: Largest norm in the pass with clipping; 0 leaves that pass out.
        entry: A user's function, or its name (:mod:`dsx.verify.subject`); None for dsx's families.
        stock: Whether to run ``entry``'s model under stock DeepSpeed.
        dropout: The JSON with dropout on, to look at its masks; None if the model has none.
        distinct: Replicas with data of their own, which the others repeat; 0 for all.
        resolved: What :meth:`config` has resolved of this content, by clipping.
    """

    content: Mapping[str, Any]
    world_size: int
    steps: int
    clipping: float
    entry: str | Callable[[], Any] | None = None
    stock: bool = False
    dropout: Mapping[str, Any] | None = None
    distinct: int = 0
    resolved: dict[float, RunConfig] = field(default_factory=dict, repr=False, compare=False)

    def number(self, index: int, share: int, mesh: Mesh) -> int:
        """The number, over all replicas, of the micro-batch that is the ``index``-th of a replica."""
        return index * mesh.num_shares + (share % self.distinct if self.distinct else share)

    def config(self, clipping: float | None = None) -> RunConfig:
        """The resolved config of a job without ``entry``; with its own clipping, unless another is given."""
        clipping = self.clipping if clipping is None else clipping
        if clipping not in self.resolved:
            content = {**self.content, "gradient_clipping": clipping}
            self.resolved[clipping] = resolve(content, world_size=self.world_size)
        return self.resolved[clipping]

    def mesh(self) -> Mesh:
        if self.entry is None:
            return self.config().mesh
        stages = user_model(self.entry).num_stages
        return Mesh.of(pp=stages, dp=self.world_size // stages)

    def batch(self) -> Batch:
        return resolve_batch(self.content, self.mesh().num_shares)

    @property
    def sequence_parallel(self) -> bool:
        """Whether dsx's families run with sequence parallelism."""
        return self.entry is None and self.config().dsx.parallel.sequence_parallel

    @property
    def seed(self) -> int:
        """The seed of the generators that dropout draws from."""
        return 0 if self.entry is not None else self.config().dsx.train.seed


def observe_passes(job: VerifyJob, groups: Groups) -> Observations | None:
    """Run the layout and give all that was seen to rank 0. A collective call over all ranks."""
    passes = [
        observe_pass(job, groups, clipping) for clipping in ((0.0, job.clipping) if job.clipping else (0.0,))
    ]
    masks: list[dict[str, Mask]] | None = None
    if job.dropout is not None:
        masks = _gathered(masks_of(resolve(job.dropout, world_size=job.world_size), groups))
    if groups.rank != 0:
        return None
    return Observations(passes=[seen for seen in passes if seen is not None], masks=masks or ())


def observe_pass(job: VerifyJob, groups: Groups, clipping: float) -> RunObservation | None:
    """Build the job's model, train it and give what was seen to rank 0. A collective call over all ranks."""
    config = job.config(clipping) if job.entry is None else None
    model = None if job.entry is None else user_model(job.entry)
    batch = job.batch()

    def batches(step: int) -> Iterator[Any]:
        for index in range(batch.accumulation):
            at = job.number(index, groups.share, groups.mesh)
            if model is not None:
                yield model.batch(step, at, batch.micro)
            else:
                assert config is not None
                yield random_tokens(config, step, at)

    if config is None:
        subject = _user(job, model, groups, clipping)
    else:
        pipeline = build_layers(config, groups)
        parameters = {spec_of(parameter).name: parameter for parameter in pipeline.chunks.parameters()}
        built = _prepare(parameters, groups, fresh=config.weights is None)
        subject = _ours(pipeline, config, parameters, built)
    mine = observe_steps(subject, batches, job.steps)
    subject.inner.destroy()  # DeepSpeed's hooks hold the engine where Python's collector cannot see it
    ranks: list[RankObservation] | None = _gathered(mine)
    if ranks is None:
        return None
    return RunObservation(mesh=groups.mesh, micro_batches=batch.accumulation, clipping=clipping, ranks=ranks)


def _gathered(mine: Any) -> list[Any] | None:
    """What every rank gives, on rank 0."""
    written = io.BytesIO()
    torch.save(mine, written)  # all tensors at once, where a pickle would write a file for each
    everybody: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(written.getvalue(), everybody)
    if everybody is None:
        return None
    return [torch.load(io.BytesIO(each), weights_only=False) for each in everybody]


def _user(job: VerifyJob, model: UserModel | None, groups: Groups, clipping: float) -> Subject:
    assert model is not None
    content = {key: value for key, value in job.content.items() if key != "dsx"}
    config = {**content, **job.batch().keys(), "gradient_clipping": clipping, "steps_per_print": None}
    if not job.stock:
        pipeline = PipelineModule(**{**model.arguments, "groups": groups, "config": config})
        pipeline.proof = "under way"
        parameters = dict(pipeline.chunks.named_parameters())
        return _ours(pipeline, config, parameters, _prepare(parameters, groups, fresh=True))
    from deepspeed.pipe import PipelineModule as StockModule

    net = StockModule(**model.arguments)
    parameters = dict(net.named_parameters())
    built = _prepare(parameters, groups, fresh=True)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, config=config)
    return Subject(
        engine=engine,
        inner=engine,
        module=net,
        parameters=parameters,
        built=built,
        groups=groups,
        data=engine.grid.get_data_parallel_group(),
    )


def _ours(
    pipeline: PipelineModule,
    config: RunConfig | dict[str, Any],
    parameters: dict[str, nn.Parameter],
    built: dict[str, Tensor],
) -> Subject:
    engine = initialize(model=pipeline, config=config)[0]
    return Subject(
        engine=engine,
        inner=engine.deepspeed_engine,
        module=pipeline.chunks,
        parameters=parameters,
        built=built,
        groups=pipeline.groups,
        data=pipeline.groups.data,
    )


def _prepare(names: Mapping[str, nn.Parameter], groups: Groups, *, fresh: bool) -> dict[str, Tensor]:
    """The weights as built; then move fresh vectors, and zeros of adapters, away from their start."""
    built = {}
    for name, parameter in names.items():
        # At ZeRO-3 layers are partitioned as they are built; what is whole passes through.
        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            built[name] = parameter.detach().float().cpu().clone()
            spec = getattr(parameter, "dsx_spec", None)
            shape = spec.shape if isinstance(spec, ParamSpec) else tuple(parameter.shape)
            zeros = isinstance(spec, ParamSpec) and bool(spec.adapts) and spec.init.kind == "zeros"
            if (fresh and len(shape) == 1) or zeros:
                seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
                noise = NOISE * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                if isinstance(spec, ParamSpec):
                    noise = slices.part_of(spec, noise, groups.at)
                parameter.add_(noise.to(parameter))
    return {name: each for name, each in built.items() if groups.is_first_of(names[name])}


def random_tokens(config: RunConfig, step: int, index: int) -> MicroBatch:
    """Inputs and labels [B, S] of micro-batch ``index`` of a step, counted over all replicas.

    Inputs are ids [B, S], or ids and positions where documents are kept apart: then a row holds several of
    them. Of chats and completions some labels are -100, in each micro-batch another part.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    size = (config.micro_batch_size, config.sequence_length + 1)
    ids = torch.randint(0, config.model.vocab_size, size, generator=generator)
    padding = getattr(config.model, "pad_token_id", config.hf_config.get("pad_token_id"))
    if isinstance(padding, int):  # whose row the word embedding gives no gradient
        ids[:, -2] = padding % config.model.vocab_size
    ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    data = config.dsx.data
    trained = torch.ones_like(labels, dtype=torch.bool)
    if any(part.format != "text" or part.source == OWN for part in data.parts()):  # they may be masked
        trained = torch.rand(labels.shape, generator=generator) < (1 + index % _SHARES) / _SHARES
    begins = torch.rand(labels.shape, generator=generator) < _BEGINS
    begins[:, 0] = True
    begins[0, 1:2] = False  # so that a first token is trained in every micro-batch
    trained[0, 0] = True
    if data.keeps_apart:
        trained[:, :-1] &= ~begins[:, 1:]  # the label there is of the next document
    labels = labels.where(trained, torch.tensor(-100))
    if not data.keeps_apart:
        return MicroBatch(ids, labels)
    at = torch.arange(config.sequence_length).expand_as(ids)
    positions = at - at.where(begins, torch.zeros_like(at)).cummax(dim=1).values
    return MicroBatch((ids, positions), labels)


def scale_off(given: Tensor, output: Tensor, probability: float) -> float:
    """How far dropout's factor is off, over all elements: fp16 rounds its smallest by several per cent."""
    kept = given.detach().double() * (output != 0)
    square = float(kept.square().sum())
    return abs(float((output.detach() * kept).sum()) / square * (1 - probability) - 1) if square else 0.0


def masks_of(config: RunConfig, groups: Groups) -> dict[str, Mask]:
    """What each dropout module drops in its first call of a training step, by ``layer.path``."""
    engine = initialize(model=build_layers(config, groups), config=config)[0]
    found: dict[str, Mask] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: Dropout, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if name not in found and module.training and module.probability > 0.0:
                dropped = ((output == 0) & (inputs[0] != 0)).cpu().numpy().tobytes()
                digest = hashlib.sha256(dropped).hexdigest()
                off = scale_off(inputs[0], output, module.probability)
                found[name] = Mask(sharded=module.sharded, digest=digest, scale_off=off)

        return note

    for name, module in engine.module.named_modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(hook(name))
    numbers = range(groups.share, config.accumulation * groups.mesh.num_shares, groups.mesh.num_shares)
    engine.train_batch(random_tokens(config, 0, number) for number in numbers)
    return found


_FIX = (
    'return {"layers": [...], "loss_fn": ..., "num_stages": 2, "batch": lambda step, index, size: (x, y)}; '
    "every other key is an argument of PipelineModule"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """What a user's function gives.

    Attributes:
        arguments: The arguments of PipelineModule, ``layers`` among them.
        batch: ``batch(step, index, size) -> (inputs, labels)``: micro-batch ``index`` of a step over all
            data-parallel replicas, the same whenever it is asked for.
    """

    arguments: dict[str, Any]
    batch: Callable[[int, int, int], tuple[Any, Any]]

    @property
    def num_stages(self) -> int:
        return int(self.arguments["num_stages"])


def user_model(entry: str | Callable[[], Any]) -> UserModel:
    """Call a function, or the one that ``module:function`` or ``path/to/file.py:function`` names.

    Raises:
        ModelError: There is none, or it gives something else.
    """
    name = entry if isinstance(entry, str) else getattr(entry, "__qualname__", repr(entry))
    given = (user_function(entry) if isinstance(entry, str) else entry)()
    if not isinstance(given, Mapping):
        raise ModelError(name, f"it returns {type(given).__name__}, not a dict", _FIX)
    arguments = dict(given)
    missing = [key for key in ("layers", "num_stages", "batch") if key not in arguments]
    if missing:
        raise ModelError(name, f"what it returns lacks {', '.join(missing)}", _FIX)
    batch = arguments.pop("batch")
    if not callable(batch):
        raise ModelError(name, f"batch is {type(batch).__name__}, not a function", _FIX)
    stages = arguments["num_stages"]
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise ModelError(name, f"num_stages is {stages!r}", "give the number of pipeline stages, 1 or more")
    return UserModel(arguments=arguments, batch=batch)
