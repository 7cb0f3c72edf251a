"""A replayed record frees what torch frees, when torch frees it; against torch's own autograd."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from dsx.memory.device import fake_build
from dsx.memory.layer_record import LayerRecord, TensorForm
from dsx.memory.layer_recorder import record_layer
from dsx.memory.ledger import Label, Leaf, Ledger, Storage, Tensor, dropped
from dsx.memory.meter import StorageMeter
from dsx.memory.walk import RecordedChunk, RecordedLayer

WHAT = Label("activations", "x", "n", "test")


def new(ledger: Ledger, size_bytes: int) -> Storage:
    return Storage(ledger, WHAT, size_bytes).hold()


def form(*shape: int) -> TensorForm:
    return TensorForm(shape, "float32", 4, differentiable=True)


def recorded(layer, *shape: int, device: str = "meta") -> LayerRecord:
    with fake_build(device):
        return record_layer(layer() if isinstance(layer, type) else layer, [form(*shape)], device=device)


def test_a_storage_lives_as_long_as_its_last_holder() -> None:
    ledger = Ledger()
    storage = Storage(ledger, WHAT, 40)
    x, view = Tensor((10,), 4, storage), Tensor((2, 5), 4, storage)
    x.release()
    assert ledger.current_bytes == 40
    view.release()
    assert (ledger.current_bytes, ledger.peak_bytes) == (0, 40)


def test_rounding_and_lines_of_the_peak() -> None:
    ledger = Ledger(512)
    other = Label("gradients", "y", "n", "test")
    x, y = new(ledger, 1), Storage(ledger, other, 513).hold()
    x.drop()
    z = new(ledger, 1)
    assert (ledger.peak_bytes, ledger.at_peak) == (1536, {WHAT: 512, other: 1024})
    y.drop()
    z.drop()
    assert ledger.at_peak == {WHAT: 512, other: 1024}
    ledger.start()
    assert ledger.peak_bytes == 0


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_as_torch(again: bool) -> None:
    """Three squarings around a residual, with and without recomputation: kept bytes, peaks, what is left."""
    n = 1024
    torch.autograd.set_multithreading_enabled(False)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + x.pow(2).pow(2).pow(2)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False) if again else body(x)

    meter = StorageMeter("cpu")
    with meter:
        leaf = torch.ones(n, requires_grad=True)
        with meter.phase("forward"):
            y = run(leaf)
        kept = meter.current_bytes
        seed = torch.ones(n)
        with meter.phase("backward"):
            y.backward(seed)
        del y, seed
    ledger = Ledger()
    chunk = RecordedChunk(ledger, [RecordedLayer(ledger, recorded(run, n), {}, None)], None, saves=False)
    x = [new(ledger, 4 * n)]
    out = chunk.forward(x, [])
    assert ledger.peak_bytes == meter.peak_bytes["forward"]
    assert ledger.current_bytes == kept
    ledger.start()
    seeds = [new(ledger, 4 * n)]
    gradients = chunk.backward(seeds, first=False, divided=False)
    dropped(out)
    dropped(seeds)
    assert ledger.current_bytes == meter.current_bytes == 2 * 4 * n
    assert ledger.peak_bytes == meter.peak_bytes["backward"]
    assert len(gradients) == 1


def both(ledger: Ledger, record: LayerRecord, leaves: dict[str, Leaf]) -> list[Storage]:
    """A forward and a backward; the gradient's bytes besides what is live before."""
    chunk = RecordedChunk(ledger, [RecordedLayer(ledger, record, leaves, None)], None, saves=False)
    x, seed = [new(ledger, 40)], [new(ledger, 40)]
    dropped(chunk.forward(x, []))
    ledger.start()
    found = chunk.backward(seed, first=False, divided=False)
    dropped(x)
    dropped(seed)
    return found


def test_gradients_are_summed_in_place_if_nobody_else_holds_the_first() -> None:
    """The gradient of x * 2 + x * 3: two of the same size, of which the second is added to the first."""
    ledger = Ledger()
    record = recorded(lambda x: x * 2 + x * 3, 10)
    assert [event[0] for event in record.backward if event[0] == "sum"] == ["sum"]
    both(ledger, record, {})
    # x, the seed, and two gradients at once.
    assert (ledger.peak_bytes, ledger.current_bytes) == (4 * 40, 40)


def test_a_seed_that_the_engine_holds_is_not_overwritten() -> None:
    """The gradient of x + 2 x: the first part is the seed itself, which the caller still has."""
    ledger = Ledger()
    both(ledger, recorded(lambda x: x + x * 2, 10), {})
    # x, the seed, the second part and the sum.
    assert ledger.peak_bytes == 4 * 40


class Scaled(nn.Module):
    """A module with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def record_scaled() -> LayerRecord:
    with fake_build("meta"), torch.device("meta"):
        return record_layer(Scaled(), [form(10)], device="meta")


def test_a_leaf_may_take_its_gradients_itself() -> None:
    taken = []
    leaf = Leaf("w", (10,), 4, accumulate=lambda leaf, gradient: taken.append((leaf.name, gradient.shape)))
    both(Ledger(), record_scaled(), {"weight": leaf})
    assert taken == [("w", (10,))]
    assert leaf.grad is None


def test_a_parameter_that_two_layers_use_gets_the_sum_of_their_gradients() -> None:
    ledger, record, taken = Ledger(), record_scaled(), []

    def take(leaf: Leaf, gradient: Tensor) -> None:
        taken.append(gradient.storage.size_bytes)
        gradient.release()

    leaf = Leaf("w", (10,), 4, accumulate=take)
    layers = [RecordedLayer(ledger, record, {"weight": leaf}, None) for _ in range(2)]
    chunk = RecordedChunk(ledger, layers, None, saves=False)
    x, seed = [new(ledger, 40)], [new(ledger, 40)]
    dropped(chunk.forward(x, []))
    dropped(chunk.backward(seed, first=False, divided=False))
    assert taken == [40]
    dropped(x)
    dropped(seed)
    assert ledger.current_bytes == 0
