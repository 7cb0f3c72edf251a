"""Dropout masks: equal over tensor-parallel ranks where activations are, different everywhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dsx.config.run import RunConfig
from dsx.nn.dropout import Dropout
from dsx.parallel.groups import Groups
from dsx.parallel.mesh import Mesh
from dsx.train import recipe
from dsx.verify import diagnosis
from dsx.verify.diagnosis import Fit, ParityFinding, Shares
from dsx.verify.seen import Mask


def scale_of(tensor: Tensor) -> float:
    """The largest absolute value of a tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference over b's largest element; infinite for different shapes or a NaN."""
    if a.shape != b.shape:
        return float("inf")
    off = float((a - b).abs().max()) / max(scale_of(b), 1e-30) if a.numel() else 0.0
    return float("inf") if off != off else off  # noqa: PLR0124 (NaN)


def fit(seen: Tensor, wanted: Tensor) -> Fit:
    """The factor on ``wanted`` that brings it nearest to ``seen``."""
    y, x = seen.double().flatten(), wanted.double().flatten()
    square = float(x @ x)
    factor = float(x @ y) / square if square else 0.0
    return Fit(factor, float((y - factor * x).abs().max()) / max(scale_of(y), 1e-30))


def shares_of(seen: Tensor, parts: Tensor, dp: int) -> tuple[Shares | None, float]:
    """How often each micro-batch's gradient is in ``seen``, by least squares, and what is left, relative.

    Args:
        seen: The layout's gradient.
        parts: [m x dp, ...] what each micro-batch should contribute, replica fastest.
        dp: Data-parallel degree.

    Returns:
        None where the tensor has too few elements to tell the contributions apart.
    """
    columns, y = parts.flatten(1).double(), seen.double().flatten()
    if y.numel() < 2 * len(columns):
        return None, 0.0
    solved = torch.linalg.lstsq(columns.t(), y.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = float((y - solved @ columns).abs().max()) / max(scale_of(y), 1e-30)
    rows = solved.view(-1, dp).tolist()
    return tuple(tuple(row) for row in rows), left


def random_tokens(config: RunConfig, step: int, index: int) -> tuple[Tensor, Tensor]:
    """Ids [B, S] and labels [B, S] of micro-batch ``index`` of a step, counted over all replicas."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    size = (config.micro_batch_size, config.sequence_length + 1)
    ids = torch.randint(0, config.model.vocab_size, size, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def masks_of(config: RunConfig, groups: Groups) -> dict[str, Mask]:
    """What each dropout module drops in its first call of a training step, by ``layer.path``."""
    engine = recipe.build_engine(config, groups)
    found: dict[str, Mask] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: Dropout, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if name not in found and module.training and module.probability > 0.0:
                dropped = ((output == 0) & (inputs[0] != 0)).cpu().numpy().tobytes()
                found[name] = Mask(sharded=module.sharded, digest=hashlib.sha256(dropped).hexdigest())

        return note

    for name, module in engine.module.named_modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(hook(name))
    mesh = groups.mesh
    engine.train_batch(
        random_tokens(config, 0, index * mesh.dp + groups.dp_rank) for index in range(config.accumulation)
    )
    return found


def judge_masks(masks: Sequence[dict[str, Mask]], mesh: Mesh) -> Iterator[ParityFinding]:
    """Findings, at most one per axis: the first layer at fault.

    Args:
        masks: By rank.
        mesh: The ranks' mesh.
    """
    places = [mesh.coords(rank) for rank in range(len(masks))]
    names = list(dict.fromkeys(name for found in masks for name in found))
    by_tensor = [message for name in names for message in _over_tensor(name, masks, places)]
    by_data = [message for name in names for message in _over_data(name, masks, places)]
    for cause, messages in ((diagnosis.DROPOUT_TENSOR, by_tensor), (diagnosis.DROPOUT_DATA, by_data)):
        if messages:
            layer, what, why = messages[0]
            yield ParityFinding(cause=cause, what=what, why=why, step=1, tensor=layer)


Place = dict[str, int]
Said = tuple[str, str, str]
"""(module, what, why)."""


def _over_tensor(name: str, masks: Sequence[dict[str, Mask]], places: Sequence[Place]) -> Iterator[Said]:
    for group in _groups(name, masks, places, "tp"):
        different = len({mask.digest for mask in group})
        if group[0].sharded and different < len(group):
            what = f"dropout {name}: tensor-parallel ranks drop the same elements of different slices"
            yield name, what, "activations are cut here, so each rank must draw a mask of its own"
        if not group[0].sharded and different > 1:
            what = f"dropout {name}: tensor-parallel ranks drop different elements of the same activations"
            why = "activations are the same on every rank here: their seeds differ, or one drew more"
            yield name, what, why


def _over_data(name: str, masks: Sequence[dict[str, Mask]], places: Sequence[Place]) -> Iterator[Said]:
    for group in _groups(name, masks, places, "dp"):
        if len({mask.digest for mask in group}) < len(group):
            what = f"dropout {name}: data-parallel ranks drop the same elements"
            yield name, what, "their generators are seeded alike: replicas should draw masks of their own"


def _groups(
    name: str, masks: Sequence[dict[str, Mask]], places: Sequence[Place], axis: str
) -> list[list[Mask]]:
    """The masks of ranks that differ in ``axis`` alone, where there are several."""
    found: dict[tuple[tuple[str, int], ...], list[Mask]] = {}
    for mask, place in zip(masks, places, strict=True):
        if name in mask:
            key = tuple((other, at) for other, at in place.items() if other != axis)
            found.setdefault(key, []).append(mask[name])
    return [group for group in found.values() if len(group) > 1]
