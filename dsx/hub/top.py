"""A family's forward above its base: what it does there before and after the matrix of its head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from dsx.hub.on_meta import copied


class Top:
    """The family's causal language model, with placeholders for its base and for the matrix of its head.

    Args:
        model: The family's model.
        base: Path of its base.
        head: Path of its head.
        keep: Paths of modules that keep their own parameters; None for all, which nobody registers.
        past: Paths of modules with parameters in whose place another module hands on what it is given: the
            matrix then gets what :meth:`run` is given.
    """

    def __init__(
        self,
        model: Any,
        base: str,
        head: str,
        *,
        keep: tuple[str, ...] | None = None,
        past: tuple[str, ...] = (),
    ) -> None:
        self._base, self._head, self._past = _Base(), _HeadOf(), bool(past)
        places: dict[str, nn.Module] = {base: self._base, head: self._head}
        places |= {path: nn.Identity() for path in past}
        memo: dict[int, Any] = {}
        for path, place in places.items():
            module = model.get_submodule(path)
            vars(place).update({k: v for k, v in vars(module).items() if k not in vars(place)})
            memo[id(module)] = place  # with the module's own settings, which the family's forward may read
        self.model: Any = copied(model, memo)
        for path, module in self.model.named_modules():
            for own, parameter in list(module.named_parameters(recurse=False)):
                if keep is not None and path not in keep:
                    delattr(module, own)
                    vars(module)[own] = parameter

    def run(self, x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
        """What the forward makes of the base's outputs ``x`` with ``linear`` in the place of the matrix."""
        self._base.given = (x.detach() if self._past else x,)
        self._head.given = (linear, x if self._past else None)
        try:
            y: Tensor = self.model(inputs_embeds=x, use_cache=False).logits
        finally:
            self._base.given = self._head.given = ()
        return y

    def reached(self, x: Tensor) -> Tensor:
        """What the matrix is given, where the base gives ``x``."""
        found: list[Tensor] = []

        def linear(y: Tensor) -> Tensor:
            found.append(y)
            return y.detach()[..., :1]

        self.run(x, linear)
        return found[0]


class _Base(nn.Module):
    """In the place of the base: gives what the last layer before the head gave."""

    given: tuple[Tensor, ...] = ()

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Outputs(self.given[0])


class _Outputs:
    """Outputs of a base that hold the hidden states alone."""

    def __init__(self, hidden: Any) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Any:
        return self.last_hidden_state if place == 0 else None


class _HeadOf(nn.Module):
    """In the place of the output linear."""

    given: tuple[Any, ...] = ()

    @property
    def weight(self) -> Tensor:
        """The linear's weight: some families ask for its dtype."""
        linear = self.given[0]
        table: Any = linear.func if isinstance(linear, partial) else linear
        weight: Tensor = table.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        linear, instead = self.given
        y: Tensor = linear(x if instead is None else instead)
        return y
