"""The tape frees what torch frees, when torch frees it; against torch's own autograd where that is cheap."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from dsx.memory.ledger import Label, Leaf, Ledger, Tape, Tensor

WHAT = Label("activations", "x", "n", "test")


def test_a_storage_lives_as_long_as_its_last_view() -> None:
    ledger = Ledger()
    tape = Tape(ledger)
    x = tape.new(WHAT, 4, 10)
    view = x.view(2, 5)
    del x
    assert ledger.current_bytes == 40
    del view
    assert (ledger.current_bytes, ledger.peak_bytes) == (0, 40)


def test_rounding_and_lines_of_the_peak() -> None:
    ledger = Ledger(512)
    tape = Tape(ledger)
    other = Label("gradients", "y", "n", "test")
    x, y = tape.new(WHAT, 1, 1), tape.new(other, 1, 513)
    del x
    z = tape.new(WHAT, 1, 1)
    assert (ledger.peak_bytes, ledger.at_peak) == (1536, {WHAT: 512, other: 1024})
    del y, z
    assert ledger.at_peak == {WHAT: 512, other: 1024}
    ledger.start()
    assert ledger.peak_bytes == 0


def square(tape: Tape, x: Tensor) -> Tensor:
    """Saves its input, as torch's pow does."""
    y = tape.new(WHAT, 4, *x.shape)
    tape.record((x,), (y,), lambda saved, dy: [tape.new(WHAT, 4, *dy.shape)], saved=(x,))
    return y


def add(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Saves nothing; both gradients are its own."""
    z = tape.new(WHAT, 4, *x.shape)
    tape.record((x, y), (z,), lambda _, dz: [dz.detach(), dz.detach()])
    return z


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_as_torch(again: bool) -> None:
    """Three squarings around a residual, with and without recomputation: kept bytes, peak, what is left."""
    from dsx.memory.paper.meter import StorageMeter

    n = 1024
    torch.autograd.set_multithreading_enabled(False)
    meter = StorageMeter("cpu")
    with meter:
        leaf = torch.ones(n, requires_grad=True)

        def body(x: torch.Tensor) -> torch.Tensor:
            return x + x.pow(2).pow(2).pow(2)

        with meter.phase("forward"):
            y = torch.utils.checkpoint.checkpoint(body, leaf, use_reentrant=False) if again else body(leaf)
        kept = meter.current_bytes
        seed = torch.ones(n)
        with meter.phase("backward"):
            y.backward(seed)
        del y, seed
    ledger = Ledger()
    tape = Tape(ledger)
    held = tape.new(WHAT, 4, n)
    x = Leaf("x", (n,), 4, storage=held.storage)
    del held

    def symbolic(x: Tensor) -> Tensor:
        z = square(tape, square(tape, square(tape, x)))
        return add(tape, x, z)

    out = tape.checkpoint(symbolic, x) if again else symbolic(x)
    assert ledger.peak_bytes == meter.peak_bytes["forward"]
    assert ledger.current_bytes == kept
    ledger.start()
    seed = tape.new(WHAT, 4, n)
    tape.backward(out, seed)
    del out, seed
    assert ledger.current_bytes == meter.current_bytes == 2 * 4 * n
    # torch's pow_backward takes two temporaries of its own; the tape's square takes none.
    assert ledger.peak_bytes <= meter.peak_bytes["backward"] <= ledger.peak_bytes + 2 * 4 * n
    assert x.grad is not None


def test_gradients_are_summed_in_place_if_nobody_else_holds_the_first() -> None:
    ledger = Ledger()
    tape = Tape(ledger)
    x = Leaf("x", (10,), 4)
    y = add(tape, square(tape, x), square(tape, x))
    seed = tape.new(WHAT, 4, 10)
    ledger.start()
    tape.backward(y, seed)
    # y and the seed, and two gradients at once: the second is added to the first.
    assert (ledger.peak_bytes, ledger.current_bytes) == (4 * 40, 3 * 40)


def test_a_leaf_may_take_its_gradients_itself() -> None:
    tape, taken = Tape(Ledger()), []
    x = Leaf("x", (10,), 4, accumulate=lambda leaf, gradient: taken.append((leaf.name, gradient.shape)))
    tape.backward(square(tape, x), tape.new(WHAT, 4, 10))
    assert taken == [("x", (10,))]
    assert x.grad is None
