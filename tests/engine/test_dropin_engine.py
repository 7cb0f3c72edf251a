"""A stock pipeline with two lines changed: every name, every key of the pipeline block, users' own models."""

from __future__ import annotations

import ast
import gc
import inspect
import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import checkpointing
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe import engine as stock_engine
from torch import nn

import ranks
from dsx.engine.initialize import _uncollected
from dsx.errors import CheckpointError, ConfigError, DsxError, ModelError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

WIDTH = toy.WIDTH


def _assigned(kind: type) -> set[str]:
    """Public names that a class's methods assign to ``self``."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    stored = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def _public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _missing(rank: int, world_size: int) -> dict[str, list[str]]:
    """Names of stock DeepSpeed's three classes for which dsx has neither a meaning nor an answer."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    import dsx
    from dsx.engine import stock_engine as names_of_engine
    from dsx.engine import stock_module

    made = toy.engine(Case())
    own = [stock_module.NOT_HERE, names_of_engine.NOT_HERE]
    for owner, answers in zip((made.module, made), own, strict=True):
        assert not any(hasattr(owner, name) for name in _public(answers))
    # What PipelineEngine has of its own must not fall through to the DeepSpeedEngine of one rank's layers.
    engine = {*dir(dsx.PipelineEngine), *vars(made), *dir(names_of_engine.EngineNames), *vars(made.names)}
    below = {"enable_backward_allreduce"}  # read by the DeepSpeedEngine itself
    module = {name for name in _public(dir(PipelineModule)) if not hasattr(made.module, name)}
    return {
        "PipelineModule": sorted(
            module | _public(_assigned(PipelineModule)) - set(dir(made.module)) - set(own[0])
        ),
        "PipelineEngine": sorted(
            (_public(vars(PipelineEngine)) | _public(_assigned(PipelineEngine)))
            - engine
            - set(own[1])
            - below
        ),
        "inherited": sorted(
            n for n in _public(dir(PipelineEngine)) if n not in own[1] and not hasattr(made, n)
        ),
        "grid": sorted(
            (_public(dir(PipelineParallelGrid)) | _public(_assigned(PipelineParallelGrid)))
            - set(dir(made.module.mpu()))
            - {"mp_group"}  # stock never fills it
        ),
    }


def test_every_name_of_stock_deepspeed_is_decided_upon() -> None:
    """By introspection: a new DeepSpeed's name fails here until dsx has it or says what to use."""
    assert ranks.run(_missing, 1)[0] == {
        "PipelineModule": [],
        "PipelineEngine": [],
        "inherited": [],
        "grid": [],
    }


def test_calls_take_stock_deepspeeds_arguments() -> None:
    """In its order and with its defaults, but for the checkpoint function's."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    for stock, ours in ((deepspeed.initialize, dsx.initialize), (PipelineModule, dsx.PipelineModule)):
        theirs = dict(inspect.signature(stock).parameters)
        mine = list(inspect.signature(ours).parameters.values())
        for parameter, (name, other) in zip(mine, theirs.items(), strict=False):
            assert (parameter.name, parameter.kind) == (name, other.kind)
            assert parameter.default == other.default or name == "activation_checkpoint_func"
        assert all(more.kind is more.KEYWORD_ONLY for more in mine[len(theirs) :])
    for method in ("save_checkpoint", "load_checkpoint"):
        theirs = list(inspect.signature(getattr(stock_engine.PipelineEngine, method)).parameters)
        mine = [*inspect.signature(getattr(dsx.PipelineEngine, method)).parameters]
        assert mine[: len(theirs)] == theirs
    for method in ("train_batch", "eval_batch", "set_batch_fn", "set_dataloader", "set_dataiterator"):
        theirs = dict(inspect.signature(getattr(stock_engine.PipelineEngine, method)).parameters)
        mine = list(inspect.signature(getattr(dsx.PipelineEngine, method)).parameters.values())
        assert [parameter.default for parameter in mine] == [other.default for other in theirs.values()]


def test_the_guide_has_every_key_and_name() -> None:
    from deepspeed.runtime.config import get_pipeline_config

    from dsx.engine import stock_engine as names_of_engine
    from dsx.engine import stock_module

    guide = (Path(__file__).parents[2] / "docs/guides/dropin.md").read_text()
    names = {*get_pipeline_config({}), "use_reentrant", *_public(names_of_engine.NOT_HERE)}
    names |= _public(stock_module.NOT_HERE)
    assert [name for name in sorted(names) if f"`{name}`" not in guide and f".{name}`" not in guide] == []


def _facts(kind: Any, **keys: Any) -> list[Any]:
    """What the methods of a PipelineModule say; functions and groups by what they are."""
    tied = [
        TiedLayerSpec("table", toy.Table, tied_weight_attr=["weight", "bias"]),
        *(LayerSpec(toy.Layer) for _ in range(3)),
        torch.tanh,
        TiedLayerSpec("table", toy.Table, forward_fn=toy.head, tied_weight_attr=["weight", "bias"]),
    ]
    module = kind(tied, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform", **keys)
    grid, groups = module.mpu(), [group for _, group in module.get_tied_weights_and_groups()]
    module.set_checkpoint_interval(2)
    module._precompute_checkpointable_values()
    found = [
        {str(axis): module.topology().get_dim(axis) for axis in module.topology().get_axis_names()},
        [module.stage_owner(index) for index in range(6)],
        list(map(int, module.partitions())),
        (
            module.num_pipeline_stages(),
            module.num_stages,
            module.stage_id,
            module.activation_checkpoint_interval,
        ),
        [tuple(weight.shape) for weight, _ in module.get_tied_weights_and_groups()],
        [torch.distributed.get_process_group_ranks(group) for group in groups],
        {key: comm["ranks"] for key, comm in module.tied_comms.items()},
        module.tied_weight_attrs,
        module.fwd_map,
        len(module.forward_funcs),
        module.is_checkpointable_results,
        (int(module._local_start), int(module._local_stop), module._num_layers),
        sorted(name for name, _ in module.named_parameters()),
        module.get_additional_losses(),
        module.ckpt_prefix("runs", "tag"),
        module.ckpt_layer_path("runs", 1),
        (module.global_rank, module.world_size, module.dynamic_shape, module.loss_fn.__class__.__name__),
        [grid.stage_to_global(stage, data=0) for stage in range(2)],
        (grid.dp_groups, grid.pipe_groups, grid.p2p_groups, grid.pp_group, grid.slice_group),
        (grid.stage_id, grid.data_parallel_id, grid.is_first_stage, grid.is_last_stage, grid.ds_model_rank),
    ]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    module.allreduce_tied_weight_gradients()
    return [*found, sorted(p.grad.sum().item() for p in module.parameters())]


def _both_facts(rank: int, world_size: int) -> list[list[Any]]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    return [_facts(PipelineModule), _facts(dsx.PipelineModule)]


def test_methods_of_the_module_say_what_stock_deepspeeds_say() -> None:
    for stock, ours in ranks.run(_both_facts, 4):
        for mine, theirs in zip(ours, stock, strict=True):
            assert mine == theirs


class Counted(nn.Module):
    """A layer that counts its forwards, and drops out."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.drop(torch.tanh(self.linear(x)))


def _recomputed(rank: int, world_size: int, blocks: list[tuple[bool, int, dict[str, Any]]]) -> list[Any]:
    """Losses of two steps and forwards of the layers here: (stock DeepSpeed, ZeRO stage, pipeline block)."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    results = []
    for stock, zero, block in blocks:
        torch.manual_seed(11)
        Counted.calls = 0
        module = (PipelineModule if stock else dsx.PipelineModule)(
            [LayerSpec(Counted) for _ in range(4)], num_stages=2, loss_fn=toy.loss_fn
        )
        config = toy.config(Case(zero=zero)) | {"pipeline": block}
        start = deepspeed.initialize if stock else dsx.initialize
        made, *_ = start(model=module, model_parameters=list(module.parameters()), config=config)
        losses = [made.train_batch(toy.batches(step, 2)).item() for step in range(2)]
        results.append((losses, Counted.calls))
    return results


def test_the_config_recomputes_as_in_stock_deepspeed() -> None:
    """Two layers a rank, two micro-batches, two steps: 8 forwards, and 8 more where both are recomputed."""
    once: dict[str, Any] = {"activation_checkpoint_interval": 1}
    cases: list[tuple[bool, int, dict[str, Any]]] = [
        (True, 1, {}),
        (True, 1, {**once, "use_reentrant": False}),
        (False, 1, {}),
        (False, 1, once),
        (False, 1, {**once, "use_reentrant": False}),
        (False, 1, {**once, "use_reentrant": True}),
        (False, 0, {"activation_checkpoint_interval": 2, "use_reentrant": None}),
        (False, 3, {**once, "use_reentrant": False}),
    ]
    results = ranks.run(_recomputed, 2, cases)[0]
    assert [calls for _, calls in results] == [8, 16, 8, 16, 16, 16, 16, 16]
    for losses, _ in results:
        assert losses == pytest.approx(results[0][0], rel=1e-5)


REFUSED = [
    ({"activation_checkpoint_interval": -1}, "activation_checkpoint_interval = -1"),
    ({"activation_checkpoint_interval": True}, "activation_checkpoint_interval = true"),
    ({"use_reentrant": "no"}, "use_reentrant = 'no'"),
    ({"stages": 4}, "stages = 4"),
    ({"partition": "type:layer"}, "partition_method = 'uniform'"),
    ({"seed_layers": True}, "pass seed_layers=True to PipelineModule"),
    ({"pipe_partitioned": 1}, "pipe_partitioned = 1"),
    ({"grad_partitioned": "auto"}, "grad_partitioned = 'auto'"),
    ({"activation_checkpoint_intervall": 1}, 'write "activation_checkpoint_interval"'),
]
TAKEN: list[dict[str, Any]] = [
    {"stages": "auto", "partition": "best", "seed_layers": False, "pipe_partitioned": True},
    {"stages": 2, "partition": "Uniform", "grad_partitioned": False, "use_reentrant": None},
]


def _blocks(rank: int, world_size: int) -> tuple[list[str], set[str], list[Any]]:
    import deepspeed
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    import dsx
    from dsx.engine.initialize import apply_block

    deepspeed.init_distributed()
    keys: dict[str, Any] = {"num_stages": 2, "partition_method": "uniform"}
    module = dsx.PipelineModule(toy.layers("plain"), **keys)
    texts = []
    for block, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            dsx.initialize(model=module, config=toy.config(Case()) | {"pipeline": block})
        texts.append(str(caught.value))
    for block in TAKEN:
        apply_block(block, module, 0)
    # Every key that DeepSpeed has: its defaults, and what its engine reads.
    source = inspect.getsource(stock_engine)
    read = {n.slice.value for n in ast.walk(ast.parse(source)) if _is_key(n)} | {"use_reentrant"}
    for key in read | set(get_pipeline_config({})):
        apply_block({key: get_pipeline_config({}).get(key)}, module, 0)
    # Layers that are modules have nothing left to draw: the key does what the argument does.
    modules = dsx.PipelineModule([nn.Linear(WIDTH, WIDTH), nn.Dropout()], **keys)
    apply_block({"seed_layers": True}, modules, 0)
    sharded = dsx.PipelineModule(
        [nn.Linear(WIDTH, WIDTH)], topology=PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    )
    apply_block({"pipe_partitioned": True}, sharded, 0)
    facts: list[Any] = [modules.seed_layers, sharded.shards is not None]
    with pytest.raises(ConfigError, match="set both to the same"):
        apply_block({"grad_partitioned": False}, sharded, 0)
    apply_block({"grad_partitioned": False, "pipe_partitioned": False}, sharded, 0)
    return texts, read, [*facts, sharded.shards]


def _is_key(node: ast.AST) -> bool:
    """``self._config.pipeline["..."]``."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "pipeline"
        and isinstance(node.slice, ast.Constant)
    )


def test_every_key_of_the_pipeline_block_is_honoured_or_refused() -> None:
    texts, read, facts = ranks.run(_blocks, 2)[0]
    for text, (_, words) in zip(texts, REFUSED, strict=True):
        assert words in text
    assert {"activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned"} <= read
    assert facts == [True, True, None]


# ---- users' own models


Passed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(16, WIDTH))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Passed:
        ids, mask = inputs
        return self.weight[ids], torch.arange(ids.shape[1]).repeat(len(ids), 1), mask.bool()


class ParallelTransformerLayerPipe(nn.Module):
    """Attention and MLP; positions and mask go along."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: Passed) -> Passed:
        x, positions, mask = inputs
        x = x + 0.1 * torch.cos(positions).unsqueeze(-1)
        y, _ = self.attention(x, x, x, attn_mask=mask[0], need_weights=False)
        y = x + y
        return y + self.down(torch.tanh(self.up(y))), positions, mask


def _logits(embedding: Embedding, inputs: Passed) -> torch.Tensor:
    return inputs[0] @ embedding.weight.t()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _gpt2(base: type) -> Any:
    """A model as Megatron-DeepSpeed writes it: a subclass of PipelineModule, known by its name."""

    class GPT2ModelPipe(base):  # type: ignore[misc]
        def __init__(self, **keys: Any) -> None:
            self.num_stages = 2  # a plain attribute in stock: a subclass may set it first
            layers = [
                TiedLayerSpec("embed", Embedding),
                *(LayerSpec(ParallelTransformerLayerPipe) for _ in range(3)),
                TiedLayerSpec("embed", Embedding, forward_fn=_logits),
            ]
            super().__init__(layers=layers, loss_fn=_cross_entropy, num_stages=2, **keys)
            self.scale = 0.0

        def get_additional_losses(self) -> dict[str, torch.Tensor]:
            self.scale += 1.0
            return {"count": torch.tensor(self.scale), "two": torch.tensor(2.0)}

    return GPT2ModelPipe


def _convolutions(base: type) -> Any:
    """As in DeepSpeed's tutorial: in-place ReLU at a stage's start, functions, a module as loss."""

    class AlexNetPipe(base):  # type: ignore[misc]
        def __init__(self, **keys: Any) -> None:
            layers = [
                LayerSpec(nn.Conv2d, 3, 8, kernel_size=3, stride=2, padding=1),
                nn.functional.relu,
                LayerSpec(nn.Conv2d, 8, 8, kernel_size=3, padding=1),
                LayerSpec(nn.ReLU, inplace=True),
                LayerSpec(nn.MaxPool2d, kernel_size=2),
                lambda x: x.view(x.size(0), -1),
                LayerSpec(nn.Linear, 32, 10),
            ]
            keys |= {"num_stages": 2, "partition_method": "type:ReLU|Linear"}
            super().__init__(layers=layers, loss_fn=nn.CrossEntropyLoss(), **keys)

    return AlexNetPipe


def _texts(generator: torch.Generator) -> Any:
    ids = torch.randint(0, 16, (3, 7), generator=generator)
    return (ids[:, :-1], torch.ones(6, 6, dtype=torch.bool).triu(1).expand(3, 6, 6)), ids[:, 1:]


def _images(generator: torch.Generator) -> Any:
    labels = torch.randint(0, 10, (3,), generator=generator)
    return torch.randn(3, 3, 8, 8, generator=generator), labels


def _trained(rank: int, world_size: int, stock: bool) -> list[dict[str, Any]]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    results = []
    for make, batch in ((_gpt2, _texts), (_convolutions, _images)):
        torch.manual_seed(5)
        module = make(PipelineModule if stock else dsx.PipelineModule)(activation_checkpoint_interval=1)
        config = toy.config(Case(zero=1)) | {"pipeline": {"use_reentrant": True}, "steps_per_print": 2}
        start = deepspeed.initialize if stock else dsx.initialize
        made, *_ = start(model=module, model_parameters=list(module.parameters()), config=config)
        assert made.module is module
        made.set_has_attention_mask(make is _gpt2)
        losses = []
        for step in range(3):
            seeds = (10 * step + 4 * index + made.mpu.get_data_parallel_rank() for index in range(2))
            data = (batch(torch.Generator().manual_seed(seed)) for seed in seeds)
            losses.append(made.train_batch(data).item())
        extra = made.get_additional_losses() or {}
        results.append(
            {
                "losses": losses,
                "extra": {name: value.item() for name, value in extra.items()},
                "weights": {name: value.sum().item() for name, value in module.state_dict().items()},
            }
        )
    return results


def test_models_of_users_train_as_in_stock_deepspeed() -> None:
    """Tied embeddings, tuples of float, integer and boolean tensors, additional losses; convolutions."""
    stock = ranks.run(_trained, 4, True)
    for ours, theirs in zip(ranks.run(_trained, 4, False), stock, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["losses"] == pytest.approx(other["losses"], rel=1e-5)
            assert mine["extra"] == pytest.approx(other["extra"])
            assert mine["weights"] == pytest.approx(other["weights"], rel=1e-4, abs=1e-4)
    assert stock[0][0]["extra"]["two"] == 2.0


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), float(index)), torch.zeros(1)


class Again:
    """An iterator that begins anew where it is asked for another, as DeepSpeed's own loader does."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.now = loader, iter(loader)

    def __iter__(self) -> Any:
        self.now = iter(self.loader)
        return self

    def __next__(self) -> Any:
        return next(self.now)


class NextAlone:
    def __init__(self, loader: Any) -> None:
        self.now = iter(loader)

    def __next__(self) -> Any:
        return next(self.now)


def _seen(rank: int, world_size: int, stock: bool) -> list[list[float]]:
    """The samples that steps and evaluations read of iterators of many kinds."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    module = (PipelineModule if stock else dsx.PipelineModule)(
        layers=[nn.Linear(1, 1), nn.Linear(1, 1)], num_stages=2, loss_fn=nn.functional.mse_loss
    )
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config |= {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "steps_per_print": 1000}
    start = deepspeed.initialize if stock else dsx.initialize
    parameters = list(module.parameters())
    made, _, loader, _ = start(
        model=module, model_parameters=parameters, config=config, training_data=Numbers()
    )
    found: list[float] = []
    modules = [each for each in module.modules() if isinstance(each, nn.Linear)]
    modules[0].register_forward_pre_hook(lambda _, given: found.extend(given[0].flatten().tolist()))
    plain = torch.utils.data.DataLoader(Numbers(), batch_size=2)
    seen = []
    for iterator in (iter(loader), Again(plain), NextAlone(plain), iter(plain)):
        found.clear()
        for _ in range(2):
            made.train_batch(data_iter=iterator)
        made.eval_batch(data_iter=iterator)
        seen.append([*found])
    return seen


def test_iterators_go_on_where_they_are_as_in_stock_deepspeed() -> None:
    ours, stock = ranks.run(_seen, 2, False)[0], ranks.run(_seen, 2, True)[0]
    assert ours == stock
    assert stock[1] == [float(number) for number in range(12)]


def _manual(rank: int, world_size: int, stock: bool, zero: int, folder: str) -> dict[str, Any]:
    """A program that cuts its stages itself and assigns torch's schedule to the engine."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    class Manual(PipelineModule if stock else dsx.PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: str = "uniform") -> None:
            assert method == "manual"
            here = self._topo.get_coord(self.global_rank).pipe
            self.parts = [0, 1, len(self._layer_specs)]
            self._set_bounds(start=self.parts[here], stop=self.parts[here + 1])

    deepspeed.init_distributed()
    torch.manual_seed(5)
    layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(5)]
    module = Manual(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="manual")
    start = deepspeed.initialize if stock else dsx.initialize
    config = toy.config(Case(zero=zero)) | {"gradient_clipping": 0.0}  # stock clips by the norm of one stage
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    made, optimizer, *_ = start(model=module, model_parameters=list(module.parameters()), config=config)
    plain = getattr(optimizer, "optimizer", optimizer)  # below ZeRO's, which is no optimizer of torch's
    made.lr_scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    losses, rates = [], []
    for step in range(3):
        x = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(step))
        losses.append(made.train_batch((inputs, labels) for inputs, labels in x).item())
        rates.append(made.get_lr()[0])
    made.save_checkpoint(folder, client_state={"x": 1}, save_latest=True, exclude_frozen_parameters=True)
    made.lr_scheduler.step()
    made.load_checkpoint(folder, load_module_strict=False, load_lr_scheduler_states=False)
    epoch = made.lr_scheduler.last_epoch
    return {"losses": losses, "rates": rates, "held": sorted(module.state_dict()), "epoch": epoch}


@pytest.mark.parametrize("zero", [0, 1])
def test_a_subclasses_cut_and_an_assigned_schedule_are_taken_as_in_stock_deepspeed(
    zero: int, tmp_path: Path
) -> None:
    stock = ranks.run(_manual, 2, True, zero, str(tmp_path / "stock"))
    ours = ranks.run(_manual, 2, False, zero, str(tmp_path / "ours"))
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert mine["rates"] == theirs["rates"] == [0.05, 0.025, 0.0125]
        assert (mine["held"], mine["epoch"]) == (theirs["held"], theirs["epoch"])


PARTS: list[dict[str, bool]] = [
    {},
    {"load_optimizer_states": False},
    {"load_lr_scheduler_states": False},
    {"load_module_only": True},
    {"load_module_only": True, "load_optimizer_states": False, "load_lr_scheduler_states": False},
]
"""Arguments of load_checkpoint."""


def _of_parts(
    rank: int, world_size: int, stock: bool, loads: list[tuple[int, str]], folder: str | None
) -> list[Any]:
    """What goes on after loads of a part of a checkpoint, each into a fresh engine at a ZeRO stage.

    Args:
        stock: Whether by stock DeepSpeed.
        loads: ZeRO stages, and the folders that are loaded.
        folder: Where a checkpoint is written before, at the first stage.
    """
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()

    def made(zero: int) -> Any:
        torch.manual_seed(5)
        layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
        kind = PipelineModule if stock else dsx.PipelineModule
        module = kind(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
        if rank == 0:
            next(iter(module.parameters())).requires_grad_(False)
        config = toy.config(Case(zero=zero)) | {"gradient_clipping": 0.0}  # stock clips by one stage's norm
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
        rates = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 8, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": rates}
        start = deepspeed.initialize if stock else dsx.initialize
        parameters = [each for each in module.parameters() if each.requires_grad]
        return start(model=module, model_parameters=parameters, config=config)[0]

    def steps(engine: Any, first: int) -> list[tuple[float, float]]:
        seen = []
        for step in (first, first + 1):
            x = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(step))
            loss = engine.train_batch((inputs, labels) for inputs, labels in x).item()
            seen.append((loss, engine.get_lr()[0]))
        return seen

    if folder is not None:
        engine = made(loads[0][0])
        steps(engine, 0)
        engine.save_checkpoint(folder, client_state={"x": 7}, exclude_frozen_parameters=True)
    found = []
    for (zero, place), part in itertools.product(loads, PARTS):
        engine = made(zero)
        _, client = engine.load_checkpoint(place, load_module_strict=False, **part)
        told = (
            client["x"],
            engine.global_steps,
            engine.global_samples,
            engine.lr_scheduler.last_batch_iteration,
        )
        found.append((told, steps(engine, 2)))
    return found


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_parts_of_a_checkpoint_are_loaded_as_in_stock_deepspeed(zero: int, tmp_path: Path) -> None:
    """Checkpoints of both, without what is frozen; at ZeRO-3, which stock's pipelines lack, as at 1."""
    theirs, mine = str(tmp_path / "stock"), str(tmp_path / "ours")
    stock = ranks.run(_of_parts, 2, True, [(zero, theirs)], theirs)[1]
    ours = ranks.run(_of_parts, 2, False, [(zero, mine), (zero, theirs), (3, theirs)], mine)[1]
    for number, (told, losses) in enumerate(ours):
        expected = stock[number % len(PARTS)]
        assert told == expected[0], PARTS[number % len(PARTS)]
        assert [*map(list, losses)] == [pytest.approx([*pair], rel=1e-5) for pair in expected[1]], told
    assert len({str(losses) for _, losses in stock}) >= 3


def _layer_files(rank: int, world_size: int, folder: str) -> list[str]:
    """Layer files written by each side, read by the other into other stages, then into a running engine."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    import dsx

    deepspeed.init_distributed()
    writer = TorchCheckpointEngine()

    def build(kind: Any, seed: int, stages: int) -> Any:
        torch.manual_seed(seed)
        return kind(toy.layers("tied"), num_stages=stages, loss_fn=toy.loss_fn, partition_method="uniform")

    def weights(module: Any) -> dict[str, list[float]]:
        return {name: value.tolist() for name, value in module.state_dict().items()}

    stock, ours = build(PipelineModule, 1, 2), build(dsx.PipelineModule, 2, 2)
    stock.checkpoint_parallel_write_pipeline = False
    stock.save_state_dict(f"{folder}/stock", checkpoint_engine=writer)
    ours.save_state_dict(f"{folder}/ours", checkpoint_engine=writer)
    torch.distributed.barrier()
    fresh, whole = build(dsx.PipelineModule, 3, 2), build(dsx.PipelineModule, 3, 1)
    fresh.load_state_dir(f"{folder}/stock", checkpoint_engine=writer)
    assert weights(fresh) == weights(stock)
    whole.load_state_dir(f"{folder}/stock")
    assert weights(whole).items() >= weights(stock).items()
    stock.load_state_dir(f"{folder}/ours", checkpoint_engine=writer)
    assert weights(stock) == weights(ours)
    # Into an engine: its optimizer's fp32 weights follow, so that a step starts from what was read.
    made, *_ = dsx.initialize(model=fresh, config=toy.config(Case(zero=1, bf16=True)))
    made.module.load_state_dir(f"{folder}/ours")
    made.load_module_state_dict({"module": made.module_state_dict()})
    other, *_ = dsx.initialize(model=ours, config=toy.config(Case(zero=1, bf16=True)))
    steps = [
        [engine.train_batch(toy.batches(step, 2, dtype=torch.bfloat16)).item() for step in range(3)]
        for engine in (made, other)
    ]
    assert steps[0] == steps[1]
    errors: list[tuple[type[DsxError], Any]] = [
        (CheckpointError, lambda: ours.load_state_dir(f"{folder}/none")),
        (ModelError, lambda: made.load_module_state_dict({"module": {"x": torch.ones(1)}})),
        (ModelError, lambda: made.load_module_state_dict({})),
        (ModelError, lambda: made.set_has_attention_mask(1)),
        (ModelError, lambda: made.pipe_buffers),
        (ConfigError, lambda: ours.set_checkpoint_interval(-1)),
        (ConfigError, lambda: dsx.PipelineModule(toy.layers("plain"), 2, checkpointable_layers="Layer")),
    ]
    texts = []
    for kind, call in errors:
        with pytest.raises(kind) as caught:
            call()
        texts.append(str(caught.value))
    assert not [path for path in Path(folder).rglob("*") if path.name.endswith(".partial")]
    return texts


def test_layer_files_are_stock_deepspeeds(tmp_path: Path) -> None:
    words = [
        "has 0 files",
        "Missing key",
        "module_state_dict()",
        "not a bool",
        "engine.trace()",
        "= -1",
        '["Block"]',
    ]
    for text, word in zip(ranks.run(_layer_files, 2, str(tmp_path))[0], words, strict=True):
        assert word in text


def test_recompute_preserves_the_states_that_megatron_draws_from() -> None:
    """Dropout under DeepSpeed's tracker is the same when it is computed again."""
    from dsx.engine.chunks import checkpoint_non_reentrant

    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("tests"):
            return nn.functional.dropout(x, 0.5).tanh()

    gradients, after = [], []
    for run in (lambda x: layer(layer(x)), lambda x: checkpoint_non_reentrant(lambda y: layer(layer(y)), x)):
        tracker.reset()
        tracker.add("tests", 3)
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        output = run(x)
        layer(torch.ones(4))  # another micro-batch draws before the backward
        output.sum().backward()
        gradients.append(x.grad)
        after.append(tracker.get_states()["tests"])
    tracker.reset()
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(after[0], after[1])


def test_collections_are_off_while_an_engine_is_made_and_as_before_after_it() -> None:
    def fails() -> None:
        with _uncollected():
            assert not gc.isenabled()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fails()
    assert gc.isenabled()
    gc.disable()
    try:
        with _uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
