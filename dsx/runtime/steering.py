"""What somebody outside has to say about an engine's training steps: not this one, no further ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dsx.runtime.zero_adapters import Refuses


@dataclass(slots=True)
class Steering:
    """Asked by an engine in every training step, by all ranks.

    Attributes:
        sums: [mean loss, ranks that wanted to stop] of the last step, over all ranks: one place for all.
        stop_wanted: Whether this rank wants no further step; None never does.
        refuses: ``refuses(loss, grad_norm)``, asked alike on every rank before the weights are updated:
            whether this step must not be applied. It then counts as one that DeepSpeed skipped.
    """

    sums: torch.Tensor
    stop_wanted: Callable[[], bool] | None = None
    refuses: Callable[[float, float], bool] | None = None

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank wanted to stop by the end of the last step; the same on every rank."""
        return bool(self.sums[1] > 0)

    def wish(self) -> float:
        """This rank's part in the second of the sums."""
        return float(self.stop_wanted is not None and self.stop_wanted())

    def refuser(self, sums: torch.Tensor, reduced: dist.Work) -> Refuses | None:
        """:attr:`refuses` as a question about the gradient norm alone.

        Args:
            sums: Of the step under way.
            reduced: Their all-reduce, which is under way too.
        """
        if self.refuses is None:
            return None
        asked = self.refuses

        def refuses(norm: torch.Tensor) -> bool:
            reduced.wait()
            return asked(float(sums[0]), float(norm))

        return refuses
