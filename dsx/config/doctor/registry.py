"""All checks, in the order in which their findings are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from dsx.config.doctor.checks import (
    batch,
    kernels,
    optimizer,
    other,
    pipeline,
    precision,
    scheduler,
    together,
    under_dsx,
    units,
    unknown,
    values,
    zero,
)
from dsx.config.doctor.context import Context
from dsx.config.doctor.finding import Finding

Check = Callable[[Context], Iterator[Finding]]

# What is wrong with single keys.
_KEYS: Final[tuple[Check, ...]] = (
    other.check_duplicates,
    other.check_syntax,
    unknown.check_unknown,
    unknown.check_removed,
    other.check_newer,
    values.check_values,
    zero.check_old_form,
    zero.check_stage,
    zero.check_deprecated,
    scheduler.check_required,
    values.check_trainer,
    values.check_switched_off,
    values.check_no_effect,
)
# What does not go together.
_TOGETHER: Final[tuple[Check, ...]] = (
    batch.check_world,
    batch.check_batch_missing,
    batch.check_batch_triple,
    precision.check_both,
    precision.check_loss_scale,
    precision.check_master_weights,
    precision.check_data_types,
    precision.check_autocast,
    zero.check_offload,
    zero.check_partial_offload,
    zero.check_grad_norm,
    zero.check_reduce_scatter,
    zero.check_buckets,
    zero.check_refused_together,
    pipeline.check_zero,
    pipeline.check_block,
    pipeline.check_autotp,
    pipeline.check_autotp_off,
    pipeline.check_timers,
    pipeline.check_clipping,
    pipeline.check_accumulation,
    optimizer.check_name,
    optimizer.check_untested,
    optimizer.check_clipping,
    optimizer.check_betas,
    optimizer.check_adam,
    optimizer.check_amsgrad,
    kernels.check_parameters,
    kernels.check_same_key,
    kernels.check_zenflow,
    kernels.check_compile,
    together.check_conflicts,
    together.check_pairs,
    together.check_nvme_buffers,
    units.check_learning_rate,
    units.check_weight_decay,
    units.check_epsilon,
    units.check_betas_order,
    units.check_counts,
    units.check_difficulties,
    kernels.check_whole_numbers,
    optimizer.check_offload,
    optimizer.check_client,
    scheduler.check_name,
    scheduler.check_wrapped,
    scheduler.check_warmup,
    scheduler.check_cycle,
    other.check_clipping_default,
    other.check_activation_checkpointing,
    other.check_profiler,
)
# What dsx refuses besides.
_DSX: Final[tuple[Check, ...]] = (
    under_dsx.check_taken_over,
    under_dsx.check_precision,
    under_dsx.check_zenflow,
    under_dsx.check_optimizer,
    under_dsx.check_schedule_length,
)

CHECKS: Final[tuple[Check, ...]] = (*_KEYS, *_TOGETHER)
DSX_CHECKS: Final[tuple[Check, ...]] = (*CHECKS, *_DSX)
