"""Reference: ``data_efficiency``: curriculum learning, dynamic batching, random layer-token dropping."""

from __future__ import annotations

from dsx.doctor.key import REQUIRED, NoEffect, Rows, When, unless

_SOURCE = "runtime/data_pipeline/config.py: get_data_efficiency_config"


def _block(
    path: str, switch: str = "", source: str = _SOURCE, since: str = "", *, free: bool = False
) -> Rows:
    cause = unless(f"{switch}.enabled", f"{switch.rsplit('.', 1)[-1]} is off") if switch else ()
    return Rows(
        path=path,
        source=source,
        unknown="free" if free else "ignored",
        types="raw",
        since=since,
        no_effect=cause,
    )


_root = "data_efficiency"
_curriculum_root = f"{_root}.data_sampling.curriculum_learning"
_ltd_root = f"{_root}.data_routing.random_ltd"
_scheduler = "runtime/data_pipeline/curriculum_scheduler.py: CurriculumScheduler"
_ltd_source = "runtime/data_pipeline/data_routing/scheduler.py: RandomLTDScheduler"
_data = _block(_root, _root)
_sampling = _block(f"{_root}.data_sampling", f"{_root}.data_sampling")
_curriculum = _block(_curriculum_root, _curriculum_root)
_metric = _block(f"{_curriculum_root}.curriculum_metrics.*", source=_scheduler)
_metric_schedule = _block(f"{_metric.path}.schedule_config", source=_scheduler)
_dynamic = _block(
    f"{_root}.data_sampling.dynamic_batching", f"{_root}.data_sampling.dynamic_batching", since="0.16.5"
)
_routing = _block(f"{_root}.data_routing", f"{_root}.data_routing")
_ltd = _block(_ltd_root, _ltd_root, _ltd_source)
_token_lr = _block(f"{_ltd_root}.layer_token_lr_schedule", source=_ltd_source)
_ltd_schedule = _block(f"{_ltd_root}.random_ltd_schedule", source=_ltd_source)
_ltd_config = _block(f"{_ltd_schedule.path}.schedule_config", source=_ltd_source)
_off = (NoEffect((When(f"{_root}.enabled", "falsy"),), "data_efficiency is off"),)

BLOCKS = (
    *(
        rows.block
        for rows in (
            _data,
            _sampling,
            _curriculum,
            _metric,
            _metric_schedule,
            _dynamic,
            _routing,
            _ltd,
            _token_lr,
            _ltd_schedule,
            _ltd_config,
        )
    ),
    _block(f"{_curriculum_root}.curriculum_metrics", free=True).block,
)
KEYS = (
    _block("")("data_efficiency", "object", {}, "choose and shorten samples while training"),
    _data("enabled", "bool", False, "switch on data efficiency"),
    _data("seed", "int", 1234, "seed of its random choices", low=0),
    _data("data_sampling", "object", {}, "which samples come when"),
    _sampling("enabled", "bool", False, "switch on data sampling", no_effect=_off),
    _sampling("num_epochs", "int", 1000, "epochs that the sampler plans for", low=1),
    _sampling("num_workers", "int", 0, "worker processes of the loader", low=0),
    _sampling("pin_memory", "bool", False, "page-locked batches", since="0.16.5"),
    _sampling("curriculum_learning", "object", {}, "easy samples first"),
    _curriculum("enabled", "bool", False, "switch on curriculum learning", no_effect=_off),
    _curriculum("data_cluster_path", "string", REQUIRED, "folder for the index of samples"),
    _curriculum("curriculum_metrics", "object", REQUIRED, "difficulty measures: name -> how it grows"),
    _block(f"{_curriculum_root}.curriculum_metrics")("*", "object", None, "one measure, under its name"),
    _metric("index_to_sample_path", "string", REQUIRED, "index from the measure to samples"),
    _metric("index_to_metric_path", "string", REQUIRED, "index from samples to the measure"),
    _metric(
        "difficulty_type",
        "string",
        REQUIRED,
        "difficulty as a value or a percentile",
        choices=("value", "percentile"),
    ),
    _metric(
        "clustering_type",
        "string",
        REQUIRED,
        "whether samples are clustered by this measure",
        choices=("single_cluster", "schedule_based"),
    ),
    _metric("min_difficulty", "int", REQUIRED, "difficulty at the start"),
    _metric("max_difficulty", "int", REQUIRED, "difficulty at the end"),
    _metric(
        "schedule_type",
        "string",
        REQUIRED,
        "how it grows",
        choices=("fixed_discrete", "fixed_root", "fixed_linear", "custom"),
    ),
    _metric("schedule_config", "object", REQUIRED, "the numbers of that"),
    # Which of these are needed depends on schedule_type.
    _metric_schedule(
        "difficulty", "list", None, "fixed_discrete: the difficulties, one more than max_step", items="int"
    ),
    _metric_schedule(
        "max_step", "list", None, "fixed_discrete: the last step of each but the last", items="int"
    ),
    _metric_schedule("total_curriculum_step", "int", None, "steps until max_difficulty", low=1, unit="steps"),
    _metric_schedule("difficulty_step", "int", None, "difficulties are multiples of this", low=1),
    _metric_schedule("root_degree", "int|float", None, "fixed_root: 2 grows by a square root"),
    _sampling("dynamic_batching", "object", {}, "batches of about equal tokens", since="0.16.5"),
    _dynamic("enabled", "bool", False, "switch on dynamic batching"),
    _dynamic("metrics_path", "string", None, "folder of the sample lengths"),
    _dynamic(
        "lr_scaling_method",
        "string",
        "linear",
        "how the learning rate follows the batch size",
        choices=("linear", "sqrt", "none"),
    ),
    _dynamic("min_batch_size", "int", 1, "least samples per batch", low=1, unit="samples"),
    _dynamic("max_batch_size", "int|null", None, "most samples per batch", low=1, unit="samples"),
    _dynamic(
        "sequence_picking_order",
        "string",
        "dataloader",
        "order in which samples join batches",
        choices=("random", "seqlen", "dataloader"),
    ),
    _dynamic("max_tokens", "int", REQUIRED, "most tokens per batch", low=1, unit="tokens"),
    _dynamic("verbose", "bool", False, "print the batches"),
    _data("data_routing", "object", {}, "which tokens pass through which layers"),
    _routing("enabled", "bool", False, "switch on data routing", no_effect=_off),
    _routing("random_ltd", "object", {}, "random layer-token dropping"),
    _ltd("enabled", "bool", False, "switch on random-LTD", no_effect=_off),
    _ltd("total_layer_num", "int", REQUIRED, "layers of the model", low=1, unit="layers"),
    _ltd("random_ltd_layer_num", "int", REQUIRED, "layers that drop tokens", low=1, unit="layers"),
    _ltd("random_ltd_layer_id", "list", REQUIRED, "their numbers", items="int"),
    _ltd("model_mask_name", "string|null", REQUIRED, "name of the attention mask's argument"),
    _ltd("model_type", "string", REQUIRED, "encoder or decoder", choices=("encoder", "decoder")),
    _ltd(
        "hidden_state_order",
        "string",
        REQUIRED,
        "order of the hidden states' dimensions",
        choices=("batch_seq_dim", "seq_batch_dim"),
    ),
    _ltd("micro_batch_size", "int", None, "overwritten by train_micro_batch_size_per_gpu", status="dead"),
    _ltd("global_batch_size", "int", None, "overwritten by train_batch_size", status="dead"),
    _ltd("layer_token_lr_schedule", "object", {}, "learning rate by tokens seen: not finished in DeepSpeed"),
    _token_lr("enabled", "bool", False, "true raises NotImplementedError", choices=(False,)),
    _token_lr("total_layer_tokens", "int", None, "read by nothing", status="dead"),
    _token_lr("warmup_type", "string", None, "read by nothing", status="dead"),
    _token_lr("warmup_layer_tokens", "int", None, "read by nothing", status="dead"),
    _ltd("random_ltd_schedule", "object", REQUIRED, "how the number of kept tokens grows"),
    _ltd_schedule("min_value", "int", REQUIRED, "tokens kept at the start", low=1, unit="tokens"),
    _ltd_schedule("max_value", "int", REQUIRED, "tokens kept at the end", low=1, unit="tokens"),
    _ltd_schedule("schedule_type", "string", REQUIRED, "how it grows", choices=("fixed_linear",)),
    _ltd_schedule("schedule_config", "object", REQUIRED, "the numbers of that"),
    _ltd_config("require_steps", "int", REQUIRED, "steps until max_value", low=1, unit="steps"),
    _ltd_config("seq_per_step", "int", REQUIRED, "tokens added at a time", low=1, unit="tokens"),
)
