"""Sets of optimizers of DeepSpeed 0.19.8; tests/config/test_deepspeed_keys.py holds them against it.

What each key is stands in dsx/doctor/reference.
"""

from __future__ import annotations

from typing import Final

# DEEPSPEED_OPTIMIZERS (runtime/config.py), matched in any case, and the classes of torch.optim, in theirs.
OPTIMIZERS: Final = frozenset(
    {"Adagrad", "Adam", "AdamW", "Lamb", "MuAdam", "MuAdamW", "MuSGD", "Lion", "Muon"}
)
TORCH_OPTIMIZERS: Final = frozenset({
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
})  # fmt: skip
REMOVED_OPTIMIZERS: Final = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})

# Compiled by DeepSpeed at first use, for the machine it runs on (op_builder/).
COMPILED_OPTIMIZERS: Final = frozenset({"adam", "adamw", "lamb", "lion"})

# Optimizers that ZeRO takes without zero_allow_untested_optimizer (runtime/zero/utils.py,
# ZERO_SUPPORTED_OPTIMIZERS).
ZERO_TESTED_OPTIMIZERS: Final = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
