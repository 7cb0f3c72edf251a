"""A model folder as transformers loads it, checked against what its files hold.

A config.json is small whatever it claims, and transformers fills what the files lack with random numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.formats.huggingface import names
from dsx.errors import CheckpointError
from dsx.models.quiet_transformers import first_line, quiet_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PACKED = 16  # the most quantised weights in one stored element
OTHER_CONFIG = "use the config.json that was saved with these weights"


def pretrained(source: Catalog, dtype: torch.dtype | None, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a Hugging Face folder, as transformers loads it; pickles stay unread.

    Args:
        source: The folder.
        dtype: Of the weights; None for their own.
        trust_remote_code: Run code that the folder brings.

    Raises:
        CheckpointError: Transformers cannot load it, or its config claims what the files do not hold, or
            has no place for what they do.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with quiet_transformers():
            if not trust_remote_code:
                described = AutoConfig.from_pretrained(
                    source.root, trust_remote_code=False, local_files_only=True
                )
                _check_claims(source, described, str(source.root / names.CONFIG))
            model, told = AutoModelForCausalLM.from_pretrained(
                source.root,
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except CheckpointError:
        raise
    except Exception as error:  # a damaged folder makes transformers raise anything
        raise CheckpointError(
            str(source.root),
            f"transformers cannot load it ({first_line(error)})",
            "export or download it again",
        ) from error
    if told["missing_keys"]:  # transformers fills them with random numbers
        raise CheckpointError(
            f"{source.root}: tensor {min(told['missing_keys'])}",
            "the model of its config has it, and the files do not",
            OTHER_CONFIG,
        )
    # What the model's class itself ignores (rotary frequencies) is not among them.
    left = sorted(name for name in told["unexpected_keys"] if not names.is_buffer(name))
    if left:
        raise CheckpointError(
            f"{source.root}: tensor {left[0]}",
            f"the model of its config has no place for it (of {len(left)} such tensors)",
            OTHER_CONFIG,
        )
    return cast("PreTrainedModel", model)


def _check_claims(source: Catalog, described: PretrainedConfig, file: str) -> None:
    """Refuse a config that claims a larger model than a checkpoint holds, before the model is made.

    Raises:
        CheckpointError: It claims more parameters than the checkpoint has elements.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    claimed = sum(parameter.numel() for parameter in model.parameters())
    held = sum(entry.numel for entry in source.entries if entry.state in ("weight", "master"))
    packed = 1 if getattr(described, "quantization_config", None) is None else _PACKED
    if claimed > held * packed:
        raise CheckpointError(
            f"{file}: a model of {claimed:,} parameters",
            f"{source.root} holds {held:,} elements",
            OTHER_CONFIG,
        )
