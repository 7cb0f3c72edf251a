"""The auxiliary losses of routers, over blocks on several ranks.

transformers adds ``coefficient * experts * sum_e f_e P_e`` to the loss, where f_e is the share of the tokens
of all layers that go to expert e and P_e its mean probability (``load_balancing_loss_func``; Fedus et al.
2021, arXiv:2101.03961, equations 4 to 6). It is no sum over layers. So the sums behind f and P go from block
to block beside the hidden states, every block adds its own, and the loss is computed where the logits are:
autograd then takes the gradient of P back through the stages.

The z-loss (Zoph et al. 2022, arXiv:2202.08906, equation 5), ``coefficient * mean over tokens of
logsumexp(logits)^2``, here summed over layers, travels with those sums. Both are of a rank's micro-batch,
with context parallelism of whole rows; a step has the mean of these.

Shapes: E experts; the sums are float32 [3, E]: tokens by expert, probabilities by expert, and in the last row
the number of rows and the z-loss without its coefficient.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dsx.errors import ModelError
from dsx.hub.context_probe import block_calls
from dsx.hub.model_structure import structure_of
from dsx.hub.shrunk import random_model, shrunk
from dsx.models.config_values import at
from dsx.models.spec import Balance, HubModel
from dsx.models.transformers_settings import first_line, torch_forms

_LOGITS = "router_logits"


def balance_of(model: Any) -> Balance | None:
    """What the auxiliary loss of a transformers model depends on; None if its config does not ask for one.

    Raises:
        ModelError: The family computes it in a way that dsx does not know.
    """
    if not getattr(model.config, "output_router_logits", False):
        return None
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    told: list[Any] = [getattr(model, name, None) for name in names]
    if function is None or None in told:
        raise _unknown("the family has no load_balancing_loss_func of the usual form")
    balance = Balance(experts=int(told[0]), chosen=int(told[1]), coefficient=float(told[2]))
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(24, balance.experts, generator=generator) for _ in range(3))
    sums = fresh_sums(balance, logits[0])
    for each in logits:
        sums = sums + sums_of(each, balance)
    ours = loss_of(sums, balance)
    try:
        theirs = balance.coefficient * function(logits, balance.experts, balance.chosen, None)
    except Exception:  # noqa: BLE001 - it takes something else than logits by expert, as doge's does
        raise _unknown("the family's load_balancing_loss_func takes something else than others") from None
    if not torch.allclose(ours, torch.as_tensor(theirs), rtol=1e-5):
        raise _unknown("the family's load_balancing_loss_func is another than the usual one")
    return balance


def _unknown(why: str) -> ModelError:
    return ModelError(
        at("output_router_logits", True),
        f"its auxiliary loss cannot be computed over several stages: {why}",
        "set it to false (dsx.model.overrides), and train without that loss",
    )


def with_z_loss(model: HubModel, coefficient: float) -> HubModel:
    """The model with the z-loss of its routers."""
    balance = model.balance or Balance(experts=max(model.experts.values()))
    return replace(model, balance=replace(balance, z_loss=coefficient))


@lru_cache(maxsize=8)
def no_z_loss(config: str) -> str | None:
    """Why a model's routers have no z-loss, found by trying a small one of its kind; None if they have."""
    try:
        with torch_forms(), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            small, found = shrunk(json.loads(config), tensor=1), list[Tensor]()
            model, path = random_model(small).eval(), structure_of(json.dumps(small, sort_keys=True)).blocks
            for number, (block, call) in enumerate(block_calls(model, path, 1)):
                with Routers(model, block, f"{path}.{number}").collected() as logits:
                    call.make(block, call.hidden)
                found += logits
    except Exception as error:  # noqa: BLE001 - whatever the family's code does on this machine
        return f"no small model of it runs ({first_line(error)})"
    # Probabilities are not negative, their logarithms not positive.
    plain = all(bool((each > 0).any() and (each < 0).any()) for each in found)
    return None if found and plain else "what transformers records of its routers are no logits"


def fresh_sums(balance: Balance, like: Tensor) -> Tensor:
    """The sums before the first block."""
    return torch.zeros(3, balance.experts, dtype=torch.float32, device=like.device)


def sums_of(logits: Tensor, balance: Balance, parts: int = 1) -> Tensor:
    """The sums of one router's logits [tokens, E], of one of ``parts`` equal parts of the rows."""
    zeros = torch.zeros(balance.experts, dtype=torch.float32, device=logits.device)
    counts = probabilities = zeros
    if balance.coefficient:
        softmax = torch.softmax(logits, dim=-1)
        chosen = torch.topk(softmax, balance.chosen, dim=-1).indices
        ones = torch.ones((), dtype=torch.float32, device=logits.device).expand(chosen.numel())
        counts, probabilities = zeros.scatter_add(0, chosen.flatten(), ones), softmax.float().sum(dim=0)
    rows = zeros.clone()
    rows[0] = logits.shape[0]
    if balance.z_loss:
        rows[1] = torch.logsumexp(logits.float(), dim=-1).square().mean() / parts
    return torch.stack((counts, probabilities, rows))


def loss_of(sums: Tensor, balance: Balance) -> Tensor:
    """The auxiliary losses, a scalar."""
    z_loss = balance.z_loss * sums[2, 1]
    if not balance.coefficient:
        return z_loss
    counts, probabilities, rows = sums.detach()[0], sums[1], sums.detach()[2, 0]
    total = (counts / rows * (probabilities / rows)).sum()
    return balance.coefficient * balance.experts * total + z_loss


@dataclass(frozen=True, slots=True)
class Balanced:
    """A loss of (logits, sums) and labels: ``of_logits`` of the logits plus the auxiliary loss."""

    of_logits: Callable[..., Tensor]
    balance: Balance

    def __call__(
        self, outputs: tuple[Tensor, Tensor], labels: Tensor, num_tokens: Tensor | None = None
    ) -> Tensor:
        """The loss of a micro-batch."""
        logits, sums = outputs
        return self.of_logits(logits, labels, num_tokens=num_tokens) + loss_of(sums, self.balance)


class Routers:
    """What transformers calls router logits in a block, wherever its routers are.

    Args:
        model: The family's causal language model, which says what its routers are.
        block: The block.
        path: The block's path in the model.
    """

    def __init__(self, model: Any, block: nn.Module, path: str) -> None:
        from transformers.utils.output_capturing import OutputRecorder, recursively_install_hooks

        told = next(
            found
            for inner in model.modules()
            if (found := (getattr(inner, "_can_record_outputs", None) or {}).get(_LOGITS)) is not None
        )
        tasks = []
        for each in told if isinstance(told, list) else [told]:
            recorder = each
            if not isinstance(each, OutputRecorder):
                named = each if isinstance(each, str) else None
                recorder = OutputRecorder(None if named else each, index=1, class_name=named)
            tasks.append((_LOGITS, recorder))
        recursively_install_hooks(block, path, tasks)

    @contextmanager
    def collected(self) -> Iterator[list[Tensor]]:
        """Inside the block, router logits [tokens, E] of forwards go to the list."""
        from transformers.utils.output_capturing import _active_collector

        found: dict[str, list[Tensor]] = {_LOGITS: []}
        token = _active_collector.set(found)
        try:
            yield found[_LOGITS]
        finally:
            _active_collector.reset(token)
