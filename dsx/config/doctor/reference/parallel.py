"""Reference: ``tensor_parallel`` (AutoTP) and ``expert_parallel`` (AutoEP)."""

from __future__ import annotations

from dsx.config.doctor.key import NoEffect, When
from dsx.config.doctor.reference.rows import Rows, unless

_tensor = Rows(
    path="tensor_parallel",
    source="runtime/tensor_parallel/config.py: TPTrainingConfig",
    unknown="refused",
    types="coerced",
    since="0.16.4",
)
_tp = Rows(
    path="tensor_parallel.tp",
    source="runtime/tensor_parallel/config.py: TPConfig",
    unknown="refused",
    types="coerced",
    since="0.16.4",
)
_partition = Rows(
    path="tensor_parallel.partition_config",
    source="module_inject/autotp_config.py: AutoTPConfig.from_dict",
    unknown="ignored",
    types="raw",
    since="0.18.6",
)
_layer = Rows(
    path="tensor_parallel.partition_config.layer_specs[]",
    source=_partition.source,
    unknown="ignored",
    types="raw",
    since="0.18.6",
)
_expert = Rows(
    path="expert_parallel",
    source="module_inject/auto_ep_config.py: parse_autoep_config",
    unknown="ignored",
    types="raw",
    since="0.19.2",
    no_effect=unless("expert_parallel.enabled", "AutoEP is off"),
)
_deepep = (
    NoEffect((When("expert_parallel.comm_backend", "!=", "deepep"),), "only comm_backend deepep reads it"),
)
_models = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")

BLOCKS = (_tensor.block, _tp.block, _partition.block, _layer.block, _expert.block)
KEYS = (
    Rows(path="", source=_tensor.source, unknown="ignored", types="raw", since="0.16.4")(
        "tensor_parallel", "object", {}, "AutoTP: divide the linear layers of a Hugging Face model over ranks"
    ),
    _tensor(
        "autotp_size",
        "int",
        0,
        "tensor-parallel ranks; 0 for none, or for those of tp_model_init",
        low=0,
        unit="ranks",
    ),
    # No JSON value is a torch.dtype, so that every one is refused: kinds is empty.
    _tensor("dtype", "", None, "set by tp_model_init only: it takes a torch.dtype, which JSON cannot hold"),
    _tensor("tp_overlap_comm", "bool", False, "overlap all-reduces with backward", since="0.16.6"),
    _tensor(
        "vocab_parallel_lm_head",
        "bool|null",
        None,
        "divide the output layer by vocabulary; without it as the model's own plan says",
        since="0.19.8",
    ),
    _tensor(
        "vocab_parallel_ce_backend",
        "string",
        "torch",
        "cross entropy over that",
        choices=("torch", "liger"),
        since="0.19.8",
    ),
    _tensor("tp", "object", {}, "further options", aliases=("tensor_parallel",)),
    _tp("tp_size", "int", 1, "stored; autotp_size is what counts"),
    _tp("tp_grain_size", "int", 1, "divide in multiples of so many elements", low=1, unit="elements"),
    _tp("mpu", "null", None, "an object of Python; JSON cannot hold it"),
    _tp("tp_group", "null", None, "an object of Python; JSON cannot hold it"),
    _tensor("injection_policy_tuple", "list|null", None, "names of the layers after which to reduce"),
    _tensor("partition_config", "object|null", None, "which layers are divided, and how", since="0.18.6"),
    _partition("tp_size", "int", 1, "overwritten by autotp_size", status="dead"),
    _partition("layer_specs", "list", [], "rules, the first that matches counts"),
    _partition("embedding_partition_dim", "int", 1, "dimension along which embeddings are divided"),
    _partition("lm_head_patterns", "list", ["lm_head", "embed_out"], "names of the output layer"),
    _partition("use_default_specs", "bool", True, "put the rules of preset_model after these"),
    _partition("strict_mode", "bool", False, "fail when a linear layer matches no rule"),
    _layer("patterns", "list", [], "regular expressions over parameter names", items="string"),
    _layer(
        "partition_type",
        "string",
        "column",
        "divide outputs, divide inputs, or leave whole",
        choices=("row", "column", "skip"),
        any_case=True,
    ),
    _layer("gather_output", "bool", False, "gather the divided output"),
    _layer("grad_allreduce", "bool", False, "reduce the gradients of a layer left whole"),
    _layer("shape", "list|null", None, "view of the weight in which fused parts are apart"),
    _layer("partition_dim", "int|null", None, "dimension of that view along which to divide"),
    _layer("model_types", "list|null", None, "only for models of these types"),
    _tensor(
        "preset_model",
        "string|null",
        None,
        "built-in rules; an unknown name counts as none",
        choices=_models,
        any_case=True,
        since="0.18.6",
    ),
    _tensor("keep_module_on_host", "bool", False, "leave the divided weights in CPU memory"),
    _tensor(
        "kernel_inject",
        "bool",
        False,
        "inference kernels; without effect in training",
        aliases=("replace_with_kernel_inject",),
    ),
    Rows(path="", source=_expert.source, unknown="ignored", types="raw", since="0.19.2")(
        "expert_parallel", "object", {}, "AutoEP: divide the experts of a Hugging Face model over ranks"
    ),
    _expert("enabled", "bool", False, "switch on AutoEP"),
    _expert("autoep_size", "int", 1, "ranks over which experts are divided", low=1, unit="ranks"),
    _expert("expert_tensor_parallel_size", "int", 1, "ranks that divide one expert", low=1, unit="ranks"),
    _expert("validate_folding_routing", "bool", False, "check routing while tensor parallelism folds in"),
    _expert("async_split_plan", "bool", False, "plan the all-to-all without waiting for the device"),
    _expert(
        "preset_model",
        "string|null",
        None,
        "built-in description of the model",
        choices=("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"),
    ),
    _expert("moe_layer_pattern", "string|null", None, "regular expression over the names of such layers"),
    _expert("expert_pattern", "string|null", None, "attribute that holds the experts"),
    _expert("router_pattern", "string|null", None, "attribute that holds the router"),
    _expert("use_grouped_mm", "bool", True, "one grouped matrix product over all experts"),
    _expert("disable_triton_grouped_mm", "bool", False, "not by the Triton kernel"),
    _expert("route_norm", "bool|null", None, "normalise the scores of the chosen experts"),
    _expert("route_scale", "float", 1.0, "factor on these scores"),
    _expert(
        "score_apply",
        "string",
        "auto",
        "weight before or after the expert",
        choices=("auto", "pre", "post"),
        auto="meaning",
    ),
    _expert(
        "combine_impl",
        "string",
        "auto",
        "how the experts' results are combined",
        choices=("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"),
        auto="meaning",
    ),
    _expert(
        "row_weighting_impl",
        "string",
        "auto",
        "how rows are weighted",
        choices=("auto", "eager", "fused"),
        auto="meaning",
    ),
    _expert(
        "gate_up_impl",
        "string",
        "separate",
        "gate and up projection as one product",
        choices=("separate", "fused"),
    ),
    _expert("comm_backend", "string", "comm", "library of the all-to-all", choices=("comm", "deepep")),
    _expert("comm_num_sm", "int", 12, "multiprocessors that DeepEP takes", low=1, no_effect=_deepep),
    _expert("comm_qp_margin", "int", 4, "spare queue pairs of DeepEP", low=0, no_effect=_deepep),
    _expert(
        "comm_max_tokens_per_rank",
        "int",
        0,
        "tokens that a rank may send; needed by DeepEP",
        low=0,
        unit="tokens",
        no_effect=_deepep,
    ),
    _expert("num_expert_groups", "int|null", None, "groups of experts in routing", low=1),
    _expert("num_limited_groups", "int|null", None, "groups that a token may use", low=1),
    _expert(
        "score_func",
        "string",
        "auto",
        "function of the scores",
        choices=("auto", "softmax", "sigmoid"),
        auto="meaning",
    ),
    _expert("top_k", "int", "auto", "experts per token", low=1, auto="meaning"),
    _expert("load_balance_coeff", "null", None, "not supported: only null is taken"),
    _expert("routed_scaling_factor", "float", "auto", "factor on the routed result", auto="meaning"),
    _expert("expert_w1", "string|null", None, "name of an expert's gate weight"),
    _expert("expert_w2", "string|null", None, "name of its down weight"),
    _expert("expert_w3", "string|null", None, "name of its up weight; null if fused with the gate"),
    _expert("num_experts_attr", "string|null", None, "name of the number of experts in the model's config"),
    _expert("top_k_attr", "string|null", None, "name of the experts per token there"),
    _expert("has_shared_experts", "bool|null", None, "whether some experts see every token"),
    _expert("shared_experts_pattern", "string|null", None, "attribute that holds these"),
    _expert("shared_experts_gate_pattern", "string|null", None, "attribute that holds their gate"),
    _expert(
        "expert_activation",
        "string|null",
        None,
        "form of an expert's activation",
        choices=("swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"),
    ),
)
