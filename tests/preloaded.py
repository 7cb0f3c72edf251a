"""What the process imports that ranks of tests fork from, so that no rank does: see tests/ranks.py."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from importlib import import_module

MODULES = (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.triton_ops.autoep_fused_token_ops",
    "dsx.checkpoint.execute",
    "dsx.checkpoint.run.export",
    "dsx.checkpoint.run.state",
    "dsx.data.tokenizers",
    "dsx.engine.initialize",
    "dsx.hub.layers",
    "dsx.train.recipe",
    "dsx.verify.subject",
    "numpy.ctypeslib",
    "peft",
    "pytest",
    "torch.profiler._cupti_monitor",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)

logging.disable(logging.WARNING)  # of what packages lack that no test needs, which would be on the terminal
for _name in MODULES:
    with suppress(ImportError):
        import_module(_name)
logging.disable(logging.NOTSET)
with suppress(ImportError):
    import_module("dsx.config.keys").reference()  # 13 files that every engine's settings need
with suppress(ImportError):
    import torch

    # Ranks of tests see no such device, and torch writes down the whole stack for it at every seed.
    for _device in (torch.cuda, torch.xpu, torch.mtia):
        _device.manual_seed_all = _device.manual_seed = lambda _seed: None
gc.collect()
gc.freeze()  # collections in ranks leave these objects, and the pages that they share, alone
