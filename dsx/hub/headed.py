"""A causal language model of a family whose text model has transformers' class only inside a composite one.

Qwen2.5-VL's text model, for example, is a ``PreTrainedModel`` of its own, and what puts a head on it is the
class that has the vision tower too. What such a class does with text is put a linear on the last hidden
states; whether that is all, :mod:`dsx.hub.composite` tries.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def language_model(described: Any, *, dtype: torch.dtype) -> Any:
    """The causal language model of a config object, with fresh weights.

    Args:
        described: Of a family that has such a class, or a text model alone.
        dtype: Of the parameters.

    Raises:
        ValueError: transformers has neither.
    """
    text = None if type(described) in MODEL_FOR_CAUSAL_LM_MAPPING else _text_class(type(described))
    if text is None:
        return AutoModelForCausalLM.from_config(described, dtype=dtype, trust_remote_code=False)
    # The family's own base says which attention it has, how fresh weights are drawn and what stays in fp32.
    base = next(each for each in text.__mro__[1:] if issubclass(each, PreTrainedModel))
    kind: Any = type(f"{text.__name__}WithHead", (_Headed, base), {"text_class": text})
    return kind._from_config(described, dtype=dtype)  # noqa: SLF001 - as AutoModelForCausalLM does


def _text_class(config_class: Any) -> Any:
    """The class of a text model alone, registered or not; None if its family has none, or several."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    found: list[Any] = [
        each
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, type)
        and issubclass(each, PreTrainedModel)
        and each.__module__ == name
        and getattr(each, "config_class", None) is config_class
        and "forward" in vars(each)
        and each.__name__.endswith("Model")
    ]
    return found[0] if len(found) == 1 else None


class _Headed(GenerationMixin):
    """A text model and a linear head; its methods are those of any ``*ForCausalLM``."""

    text_class: Any
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' form
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012 - as above

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.text_class._from_config(config)  # noqa: SLF001 - as above
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers reads the source of a class's module; replicas of eager loops gather in other orders.
        return bool(cls.text_class._can_set_experts_implementation())  # noqa: SLF001 - as above

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, **others: Any
    ) -> CausalLMOutputWithPast:
        """Logits [B, S, V] of ids [B, S] or of ``inputs_embeds``, and the loss of labels [B, S]."""
        outputs = self.model(input_ids=input_ids, **others)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=getattr(outputs, "past_key_values", None)
        )
