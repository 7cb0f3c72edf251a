"""Which arguments are honoured, mean nothing or are refused, and what is said."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
from accelerate.utils import DeepSpeedPlugin, HfDeepSpeedConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import SchedulerType

import dsx
from config.sample_config import AUTO_DECAY
from dsx.checkpoint import store
from dsx.config.ordinary import complete
from dsx.config.resolve import resolve
from dsx.doctor.examine import examine
from dsx.doctor.run import trainer_block
from dsx.errors import ConfigError, DsxError, ModelError
from dsx.trainer.arguments import (
    ATTRIBUTES_NOT_THERE,
    HONOURED,
    NO_MATTER,
    NOT_THERE,
    REFUSED,
    refusals,
    refuse,
    refuse_means_by_rank,
)
from dsx.trainer.configure import GivenModel, configure
from trainer import scripts_of_both as scripts

LLAMA = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
JSON = {"zero_optimization": {"stage": 1}, "dsx": {"parallel": {"tensor": 1, "pipeline": 2, "chunks": 1}}}

ALONE = {"dsx": {"parallel": {"tensor": 1, "pipeline": 1}}}


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    return TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("out")), deepspeed=JSON, use_cpu=True, report_to="none"
    )


def changed(args, **values):
    """The same arguments with others, without another process state."""
    other = object.__new__(TrainingArguments)
    other.__dict__.update({**args.__dict__, **values})
    return other


ARGUMENTS = {each.name for each in dataclasses.fields(TrainingArguments)}
NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # than transformers 5.17


def model():
    return AutoConfig.for_model("llama", **LLAMA)


def test_every_argument_is_classified_once():
    names = ARGUMENTS | NEWER
    parts = [set(HONOURED), set(NO_MATTER), set(REFUSED)]
    assert set.union(*parts) == names
    assert sum(map(len, parts)) == len(names)


def test_defaults_are_fine(args):
    assert refusals(args, {}) == []


REFUSED_VALUES = {
    "activation_checkpointing_kwargs": {"every_n_layers": 2},
    "auto_find_batch_size": True,
    "batch_eval_metrics": True,
    "debug": ["underflow_overflow"],
    "enable_jit_checkpoint": True,
    "fsdp": "full_shard",
    "gradient_checkpointing_kwargs": {"preserve_rng_state": False},
    "label_smoothing_factor": 0.1,
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "neftune_noise_alpha": 5.0,
    "optim": "adafactor",
    "optim_args": "rank=4",
    "optim_target_modules": "all-linear",
    "parallelism_config": object(),
    "push_to_hub": True,
    "save_on_each_node": True,
    "skip_memory_metrics": False,
    "torch_compile": True,
    "train_sampling_strategy": "batch_rebalance",
    "use_liger_kernel": True,
}


@pytest.mark.parametrize("name", sorted(set(REFUSED) - (NEWER - ARGUMENTS)))
def test_each_refusal_names_its_argument(args, name):
    value = REFUSED_VALUES.get(name)
    if name == "accelerator_config":
        value = dataclasses.replace(args.accelerator_config, split_batches=True)
    (error,) = refusals(changed(args, **{name: value}), {})
    assert error.where.startswith(name)
    assert REFUSED[name].why in str(error)
    assert error.fix == REFUSED[name].fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim", "sgd"),
        ("train_sampling_strategy", "sequential"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": True}),
    ],
)
def test_values_that_are_fine(args, name, value):
    assert refusals(changed(args, **{name: value}), {}) == []


def test_all_refusals_come_together_before_anything_is_built(args):
    given = {"compute_loss_func": print, "optimizers": (object(), None), "tokenizer": 1}
    with pytest.raises(ConfigError) as caught:
        dsx.Trainer(model(), changed(args, fsdp="full_shard", neftune_noise_alpha=5.0), **given)
    for name in ("fsdp", "neftune_noise_alpha", "compute_loss_func", "optimizers", "tokenizer"):
        assert name in str(caught.value)
    assert "tokenizer=): no such argument. Fix: call it processing_class=" in str(caught.value)


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig"])
def test_arguments_of_trl_are_refused_as_such(args, name):
    kind = type(name, (TrainingArguments,), {"__module__": "trl.trainer.of_it"})
    other = object.__new__(type("Mine", (kind,), {}))
    other.__dict__.update(args.__dict__)
    with pytest.raises(ConfigError, match=r"args=Mine\(...\)\): they are TRL's.*pass TrainingArguments"):
        dsx.Trainer(model(), other)


def test_an_argument_of_a_subclass(args):
    @dataclasses.dataclass
    class More(TrainingArguments):
        beams: int = 1

    other = object.__new__(More)
    other.__dict__.update({**args.__dict__, "beams": 1})
    assert refusals(other, {}) == []
    other.beams = 4
    (error,) = refusals(other, {})
    assert "beams = 4" in str(error)
    assert "More" in str(error)


def test_names_that_are_not_there(args):
    trainer = dsx.Trainer(model(), changed(args, deepspeed=ALONE))
    for name in (*NOT_THERE, *ATTRIBUTES_NOT_THERE):
        assert not hasattr(trainer, name)
        with pytest.raises(DsxError, match=f"dsx.Trainer.{name}: it is not there"):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        trainer.tran  # noqa: B018


def test_every_public_name_of_transformers_trainer_has_a_place(args):
    trainer = dsx.Trainer(model(), changed(args, deepspeed=ALONE))
    for name in (name for name in vars(Trainer) if not name.startswith("_")):
        assert (name in NOT_THERE) != hasattr(trainer, name), name
    plain = TrainingArguments(output_dir=args.output_dir, use_cpu=True, report_to="none")
    theirs = Trainer(AutoModelForCausalLM.from_config(model()), plain)
    for name, value in vars(theirs).items():
        named = {*NOT_THERE, *ATTRIBUTES_NOT_THERE}
        assert name.startswith("_") or (name in named) != hasattr(trainer, name), name
        if value is None or isinstance(value, bool):
            ours = getattr(trainer, name, value)
            assert bool(ours) == bool(value) or name == "is_deepspeed_enabled", name


def test_what_scripts_ask_after_training(args):
    trainer = dsx.Trainer(
        model(), changed(args, deepspeed=ALONE), train_dataset=scripts.Texts(4, seed=1, longest=8)
    )
    assert (trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled, trainer.is_model_parallel) == (
        True,
        False,
        False,
    )
    assert trainer.model_wrapped is trainer.model
    trainer.engine = engine = object()
    assert trainer.deepspeed is trainer.model_wrapped is engine
    trainer.accelerator.wait_for_everyone()
    assert trainer.accelerator.is_main_process
    assert (trainer.accelerator.process_index, trainer.accelerator.num_processes) == (0, 1)
    with pytest.raises(DsxError, match=r"accelerator.unwrap_model: it is not there.*trainer.engine"):
        trainer.accelerator.unwrap_model(trainer.model)


def test_a_loader_that_reads_what_is_set_later(args):
    class Mine(dsx.Trainer):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.late = 1

        def get_train_dataloader(self):
            assert self.late
            return super().get_train_dataloader()

    with pytest.raises(ModelError, match=r"Mine.late: it is not set yet.*set it before super\(\).__init__"):
        Mine(model(), changed(args, deepspeed=ALONE), train_dataset=scripts.Texts(4, seed=1, longest=8))


def resolved(args, world_size=4, shares=2, **values):
    given = GivenModel.of(model(), Path(args.output_dir))
    return configure(
        changed(args, **values), given, world_size=world_size, steps=10, longest=32, shares=shares
    )


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (3, 1), (3, 2), (5, 1)])
def test_rows_are_made_to_divide_over_the_ranks_that_share_them(args, context, tensor):
    degrees = {"tensor": tensor, "pipeline": 1, "context": context}
    run = resolved(args, context * tensor, 1, deepspeed={"dsx": {"parallel": degrees}})
    assert 32 <= run.dsx.data.sequence_length <= 64
    assert (run.mesh.cp, run.mesh.tp) == (context, tensor)


def test_auto_becomes_what_the_arguments_say(args):
    """As HfTrainerDeepSpeedConfig fills it in, but for the number of data-parallel ranks."""
    json = JSON | {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto",
                "betas": "auto",
                "eps": "auto",
                "weight_decay": "auto",
                "torch_adam": True,
            },
        },
        "scheduler": AUTO_DECAY,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    values = {
        "learning_rate": 1e-3,
        "weight_decay": 0.2,
        "warmup_steps": 0.3,
        "max_grad_norm": 0.5,
        "bf16": True,
    }
    config = resolved(
        args, deepspeed=json, per_device_train_batch_size=3, gradient_accumulation_steps=4, **values
    )
    filled = config.deepspeed
    assert (config.micro_batch_size, config.accumulation, config.global_batch_size) == (3, 4, 24)
    assert (config.precision, config.gradient_clipping, config.zero_stage) == ("bf16", 0.5, 3)
    params = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.2, "torch_adam": True}
    assert filled["optimizer"]["params"] == params
    assert filled["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 3,
        "total_num_steps": 10,
    }
    assert filled["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert filled["zero_optimization"]["stage3_param_persistence_threshold"] == 10 * 32


def test_what_the_json_leaves_out_comes_from_the_arguments(args):
    recomputes = "activation_checkpointing" if ARGUMENTS >= NEWER else "gradient_checkpointing"
    config = resolved(args, optim="adamw_torch", learning_rate=1e-3, seed=5, **{recomputes: True})
    assert config.deepspeed["optimizer"]["params"]["lr"] == 1e-3
    assert (config.dsx.recompute, config.dsx.train.seed, config.dsx.train.steps) == ("full", 5, 10)
    assert (config.mesh.pp, config.mesh.dp) == (2, 2)
    assert config.precision == "fp32"


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({}, "bf16"),
        ({}, "fp16"),
        ({"bf16": {"enabled": "auto"}}, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "fp16"),
        ({"bf16": {"enabled": False}}, "fp16"),
        ({"fp16": {"enabled": "auto"}}, "bf16"),
    ],
)
def test_the_precision_is_what_accelerate_makes_of_arguments_and_json(args, block, name):
    """Also where the JSON has the other block alone: such runs were in fp32."""
    json = JSON | copy.deepcopy(block)
    plugin = DeepSpeedPlugin(hf_ds_config=HfDeepSpeedConfig(json | {"train_micro_batch_size_per_gpu": 1}))
    plugin.set_mixed_precision(name)
    theirs = [key for key in ("bf16", "fp16") if plugin.deepspeed_config[key]["enabled"]]
    assert [resolved(args, deepspeed=JSON | block, **{name: True}).precision] == [name] == theirs


def test_no_block_makes_a_run_in_half_precision_one_in_fp32(args):
    """DeepSpeed takes a block without "enabled" for one that is off, and accelerate leaves it so."""
    for key, block in (
        ("fp16", {"initial_scale_power": 16}),
        ("bf16", {}),
        ("bfloat16", {"enabled": "auto"}),
    ):
        name = key.replace("bfloat", "bf")
        assert resolved(args, deepspeed=JSON | {key: block}, **{name: True}).precision == name
    with pytest.raises(ConfigError, match=r"bf16.enabled=False vs hf bf16\|bf16_full_eval=True"):
        resolved(args, deepspeed=JSON | {"bfloat16": {"enabled": False}}, bf16=True)


@pytest.mark.parametrize(
    ("json", "said"),
    [
        ({"zero_optimization": {"stage": 1}}, "the config has no dsx block"),
        (JSON | {"train_micro_batch_size_per_gpu": 5}, "train_micro_batch_size_per_gpu=5"),
        (JSON | {"train_batch_size": 17}, "train_batch_size=17"),
        (JSON | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16"),
        (
            JSON | {"dsx": {"train": {"steps": 5, "output": "runs"}}},
            "takes it from max_steps and num_train_epochs",
        ),
        (JSON | {"dsx": {"data": {"source": "my.jsonl"}}}, "train_dataset and data_collator"),
        (JSON | {"dsx": {"model": {"preset": "tiny"}}}, "Trainer(model=)"),
        (JSON | {"dsx": {"tracking": {"wandb": {"mode": "online"}}}}, "takes it from report_to"),
        (JSON | {"dsx": {"elastic": {}}}, "dsx.elastic"),
        (JSON | {"dsx": {"outer": {"islands": 2}}}, "dsx.Trainer trains one job, no islands"),
        (JSON | {"dsx": {"parallel": {"tensor": 3}}}, "dsx.parallel.tensor = 3"),
        (JSON | {"dsx": {"faults": {"nonfinite": "roll_back"}}}, "does not roll back"),
    ],
)
def test_a_json_that_cannot_be(args, json, said):
    with pytest.raises(DsxError) as caught:
        resolved(args, deepspeed=json)
    assert said in str(caught.value)


def test_the_doctor_knows_a_block_for_dsx_trainer():
    """A Trainer's "auto" beside a block that names no model, and what is wrong in that block."""
    json = JSON | {"train_micro_batch_size_per_gpu": "auto"}
    report = examine(json)
    assert report.runner == "trainer"
    assert not report.errors
    assert trainer_block(json) == []
    assert examine(json | {"dsx": {"model": {"preset": "tiny"}}}).runner == "dsx"
    (unknown,) = trainer_block(json | {"dsx": {"parallel": {"tensr": 2}}})
    assert unknown.path == ("dsx", "parallel", "tensr")
    (steps,) = trainer_block(json | {"dsx": {"train": {"steps": 5}}})
    assert (steps.path, steps.value) == (("dsx", "train", "steps"), 5)


def test_such_a_json_is_estimated_with_a_model():
    """What TrainingArguments would say is assumed, and said."""
    filled = complete(JSON | {"train_micro_batch_size_per_gpu": "auto"}, "llama/tiny")
    assert "train_micro_batch_size_per_gpu = 8 (the Trainer's default)" in map(str, filled.assumed)
    run = resolve(filled.content, world_size=4)
    assert (run.mesh.pp, run.mesh.dp, run.micro_batch_size) == (2, 2, 8)


EVALUATED = {"eval_strategy": "epoch"}
TOGETHER = [
    ({**EVALUATED, "save_only_model": True, "load_best_model_at_end": True}, "save_only_model"),
    ({**EVALUATED, "save_strategy": "best"}, "no metric says which checkpoint is best"),
    (
        {"save_strategy": "best", "metric_for_best_model": "loss"},
        'save_strategy = "best": nothing is evaluated',
    ),
    ({**EVALUATED, "metric_for_best_model": "accuracy"}, "without compute_metrics= the loss is the only"),
    (
        {**EVALUATED, "metric_for_best_model": "accuracy", "prediction_loss_only": True, "METRICS": True},
        "with prediction_loss_only the loss is the only metric",
    ),
    ({**EVALUATED, "metric_for_best_model": "loss", "SETS": ("a", "b")}, 'write "a_loss", or the like'),
    (
        {**EVALUATED, "metric_for_best_model": "eval_b_accuracy", "SETS": ("a", "b")},
        'pass compute_metrics=, or use "b_loss"',
    ),
    ({**EVALUATED, "SETS": None}, 'eval_strategy = "epoch": there is no eval_dataset'),
    ({"eval_on_start": True, "SETS": None}, "eval_on_start = true: there is no eval_dataset"),
    ({"bf16_full_eval": True}, "bf16_full_eval = true: an evaluation computes in the precision"),
    ({"mixed_precision": "bf16"}, "ACCELERATE_MIXED_PRECISION = bf16: the launcher asks for it"),
    ({"max_steps": 0}, "max_steps = 0: it asks neither for steps nor for epochs"),
    ({"max_grad_norm": None}, "max_grad_norm = null: it is no norm"),
    ({"max_grad_norm": -1.0}, "max_grad_norm = -1.0: it is no norm"),
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers = true: there are no workers"),
    # These do.
    ({**EVALUATED, "metric_for_best_model": "b_loss", "SETS": ("a", "b")}, ""),
    ({**EVALUATED, "metric_for_best_model": "eval_a_accuracy", "SETS": ("a", "b"), "METRICS": True}, ""),
    ({**EVALUATED, "metric_for_best_model": "loss", "prediction_loss_only": True}, ""),
    ({**EVALUATED, "mixed_precision": "bf16", "bf16": True}, ""),
]


@pytest.mark.parametrize(("values", "said"), TOGETHER)
def test_arguments_that_cannot_hold_together_are_refused_before_the_first_step(args, values, said):
    values = dict(values)
    sets, metrics = values.pop("SETS", ()), values.pop("METRICS", False)
    evaluated = None if sets is None else dict.fromkeys(sets, ()) if sets else ()
    with pytest.raises(ConfigError, match=re.escape(said)) if said else nullcontext():
        refuse(changed(args, **values), {}, metrics=metrics, evaluated=evaluated)


def test_a_mean_by_rank_is_refused_for_several_ranks(args):
    alone = changed(args, average_tokens_across_devices=False)
    refuse_means_by_rank(alone, 1)
    refuse_means_by_rank(args, 2)
    with pytest.raises(ConfigError, match="the mean over all 2 data-parallel ranks' tokens"):
        refuse_means_by_rank(alone, 2)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [("cosine_with_min_lr", {}), ("polynomial", {"lr_end": 1.0}), ("linear", {"cycles": 2})],
)
def test_a_schedule_that_cannot_be_is_refused_before_weights_are_read(args, kind, kwargs):
    several = changed(
        args, lr_scheduler_type=SchedulerType(kind), lr_scheduler_kwargs=kwargs, deepspeed=ALONE
    )
    with pytest.raises(
        ConfigError, match=f'lr_scheduler_kwargs = .*: the schedule "{kind}" does not take it'
    ):
        dsx.Trainer(model(), several, train_dataset=scripts.Texts(4, seed=1))


def test_blocks_that_shall_and_shall_not_be_computed_again(args):
    json = JSON | {"dsx": {**JSON["dsx"], "recompute": "none"}}
    names = {"activation_checkpointing", "gradient_checkpointing"} & ARGUMENTS
    with pytest.raises(ConfigError, match=r'dsx.recompute = "none": activation_checkpointing asks for'):
        resolved(args, deepspeed=json, **dict.fromkeys(names, True))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("compute_loss", print, ""),
        ("training_step", print, "a step is one call of the engine"),
        ("_get_train_sampler", print, "train_sampling_strategy orders samples; get_train_dataloader may"),
        ("_move_model_to_device", print, "it is not there"),
        ("_save_checkpoint", print, "its own method of this name does something else"),
        ("_report", print, "its own method of this name does something else"),
        ("model_accepts_loss_kwargs", False, ""),
        ("compute_loss_func", len, ""),
        ("label_smoother", len, ""),
    ],
)
def test_what_a_subclass_sets_and_nothing_looks_at_is_refused(args, name, value, why):
    with pytest.raises(ModelError, match=rf"Mine\.{name}: dsx.Trainer never calls it: {why}"):
        type("Mine", (dsx.Trainer,), {name: value})(model(), args)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("args.learning_rate", 1.0),
        ("train_dataset", []),
        ("compute_loss_func", print),
        ("model_accepts_loss_kwargs", False),
        ("training_step", print),
    ],
)
def test_what_is_set_after_the_trainer_was_made_is_refused(args, name, value):
    trainer = dsx.Trainer(
        model(), changed(args, deepspeed=ALONE), train_dataset=scripts.Texts(4, seed=1, longest=8)
    )
    owner, _, own = f"trainer.{name}".rpartition(".")
    setattr({"trainer": trainer, "trainer.args": trainer.args}[owner], own, value)
    with pytest.raises(ConfigError, match=f"trainer.{name}: it was set after"):
        trainer.train()


def test_positional_arguments_are_those_of_transformers():
    ours, theirs = (list(inspect.signature(kind.__init__).parameters) for kind in (dsx.Trainer, Trainer))
    assert ours[: len(theirs)] == theirs


def test_weights_alone_are_no_checkpoint_and_torchs_renamings_are_not_told_at_each_step(args, tmp_path):
    model().save_pretrained(tmp_path / "checkpoint-3")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = dsx.Trainer(model(), changed(args, deepspeed=ALONE))
        for module in ("torch.distributed.c10d_logger", "mine"):
            warnings.warn_explicit("it is deprecated", FutureWarning, module, 83, module=module)
    assert [each.filename for each in told if "it is deprecated" in str(each.message)] == ["mine"]
    with pytest.raises(DsxError, match="it holds a model alone, as save_only_model"):
        trainer._checkpoint(str(tmp_path / "checkpoint-3"))
    (tmp_path / "checkpoint-3" / store.MANIFEST).touch()  # with a config beside it, which save_model writes
    assert trainer._checkpoint(str(tmp_path / "checkpoint-3")) == tmp_path / "checkpoint-3"


def test_callbacks_are_added_and_removed(args):
    class Mine(TrainerCallback):
        pass

    trainer = dsx.Trainer(model(), changed(args, deepspeed=ALONE), callbacks=[Mine])
    assert isinstance(trainer.pop_callback(Mine), Mine)
    trainer.add_callback(Mine())
    trainer.remove_callback(Mine)
    assert trainer.pop_callback(Mine) is None
