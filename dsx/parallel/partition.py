"""Cut a layer list into contiguous virtual stages.

A pipeline runs at the pace of its heaviest stage, so weighted methods minimise the largest stage weight,
exactly; among such cuts they take the one with the least sum of squares, so that the other stages are even
too. DeepSpeed's partition_balanced (runtime/utils.py) minimises largest minus smallest instead, which now and
then makes the largest stage heavier.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from dsx.errors import LayoutError
from dsx.parallel.stages import StageMap

METHODS = ("uniform", "parameters", "flops", "type:<regex>")


def partition(
    method: str | Sequence[int],
    num_stages: int,
    num_ranks: int,
    *,
    parameters: Sequence[int],
    costs: Sequence[float] | None = None,
    names: Sequence[str],
) -> StageMap:
    """Stage map of ``len(names)`` layers.

    Args:
        method: ``uniform`` (equal numbers of layers), ``parameters``, ``flops`` (balances ``costs``),
            ``type:<regex>`` (balances the layers whose name matches, as DeepSpeed does: re.search, ignoring
            case), or the number of layers of each virtual stage.
        num_stages: Virtual stages, pipeline degree x chunks.
        num_ranks: Pipeline degree.
        parameters: Parameters per layer.
        costs: FLOPs or seconds per layer, for ``flops``.
        names: Class name per layer.
    """
    num_layers = len(names)
    _check_stages(num_stages, num_ranks, num_layers)
    if not isinstance(method, str):
        counts = tuple(method)
        if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
            raise LayoutError(
                f"partition method {list(counts)}",
                f"not {num_stages} counts of at least 1 that add up to {num_layers} layers",
                f"give one count per virtual stage, e.g. {list(_uniform(num_layers, num_stages))}",
            )
        return StageMap.of(counts, num_ranks)
    if method == "uniform":
        return StageMap.of(_uniform(num_layers, num_stages), num_ranks)
    return StageMap(balanced(_weights(method, parameters, costs, names), num_stages), num_ranks)


def balanced(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Bounds of the contiguous cut with the least largest part; among equals, the least sum of squares.

    Every part gets at least one item. O(num_stages x n x (log n + n / num_stages)) typically.

    >>> balanced([4, 1, 1, 1, 1, 4], 3)
    (0, 1, 5, 6)
    """
    sums = [0, *accumulate(weights)]
    cap = _least_largest(sums, num_stages)
    n = len(weights)
    # best[i]: least sum of squares of items [0, i) in `part` parts of at most cap each; cut[i]: the last cut.
    best: dict[int, float] = {0: 0.0}
    cuts: list[dict[int, int]] = []
    for part in range(1, num_stages + 1):
        now: dict[int, float] = {}
        cut: dict[int, int] = {}
        for i in range(part, n - (num_stages - part) + 1):
            for k in range(i - 1, part - 2, -1):
                weight = sums[i] - sums[k]
                if weight > cap:
                    break
                if k in best and (i not in now or best[k] + weight * weight < now[i]):
                    now[i], cut[i] = best[k] + weight * weight, k
        best = now
        cuts.append(cut)
    bounds = [n]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(reversed(bounds))


def _least_largest(sums: Sequence[float], num_stages: int) -> float:
    """The least possible largest part of a contiguous cut into non-empty parts, by dynamic programming.

    With least[k] for one part fewer, part (k, i] costs max(least[k], sums[i] - sums[k]): the first grows with
    k and the second falls, so the best k is where they cross.
    """
    n = len(sums) - 1
    least = {i: sums[i] for i in range(1, n + 1)}
    for parts in range(2, num_stages + 1):
        now = {}
        for i in range(parts, n + 1):
            low, high = parts - 1, i - 1
            while low < high:  # the first k whose least[k] is no smaller than the last part, or i - 1
                middle = (low + high) // 2
                if least[middle] >= sums[i] - sums[middle]:
                    high = middle
                else:
                    low = middle + 1
            now[i] = min(max(least[k], sums[i] - sums[k]) for k in range(max(parts - 1, low - 1), low + 1))
        least = now
    return least[n]


def _uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers, with one more in the first stages (as deepspeed's partition_uniform)."""
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


def _weights(
    method: str, parameters: Sequence[int], costs: Sequence[float] | None, names: Sequence[str]
) -> Sequence[float]:
    if method.startswith("type:"):
        return matches(method, names)
    where = f"partition method {method!r}"
    if method in ("time", "profile"):
        raise LayoutError(
            where,
            "the layers' times are not measured here",
            "measure with dsx.planner.profiler.profile_layers, cut with dsx.planner.choose.choose and give "
            "that stage_map; in a config, dsx.partition.method = time does so",
        )
    if method not in ("parameters", "flops"):
        raise LayoutError(where, "no such method", f"use {', '.join(METHODS)} or a list of layer counts")
    weights = parameters if method == "parameters" else costs
    if weights is None:
        raise LayoutError(where, "this model's layer costs are not known", "use parameters or uniform")
    if len(weights) != len(names):
        what = f"{len(weights)} weights for {len(names)} layers"
        raise LayoutError(where, what, "give one weight per layer")
    return weights


def matches(method: str, names: Sequence[str]) -> list[int]:
    """1 for each layer whose name ``type:<regex>`` finds, else 0. Raises LayoutError if it finds none."""
    pattern = method.removeprefix("type:")
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise LayoutError(
            f"partition method {method!r}", f"not a regular expression: {error}", "correct the expression"
        ) from error
    weights = [int(regex.search(name) is not None) for name in names]
    if not any(weights):
        known = ", ".join(sorted(set(names)))
        raise LayoutError(f"partition method {method!r}", "no layer's type matches", f"match one of: {known}")
    return weights


def _check_stages(num_stages: int, num_ranks: int, num_layers: int) -> None:
    if num_stages < 1 or num_ranks < 1 or num_stages % num_ranks:
        raise LayoutError(
            f"{num_stages} virtual stages",
            f"not a positive multiple of the pipeline degree {num_ranks}",
            "use pipeline degree x chunks",
        )
    if num_stages > num_layers:
        chunks = num_layers // num_ranks
        fix = f"at pipeline degree {num_ranks} use at most {chunks} chunks" if chunks else "use fewer stages"
        raise LayoutError(
            f"{num_stages} virtual stages ({num_ranks} pipeline ranks x {num_stages // num_ranks} chunks)",
            f"the model has {num_layers} layers and every stage needs one",
            f"{fix}; pipeline degrees 1 to {num_layers} are possible",
        )
