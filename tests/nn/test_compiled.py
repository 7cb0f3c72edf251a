"""Compiled blocks compute what the same blocks compute as they are, and are compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import tiny_models
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from dsx.models import families
from dsx.models.spec import Adapter
from dsx.nn import WeightGradients
from dsx.nn.compiled import compile_blocks


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs of other tests, and no setting that one leaves behind."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(nested_graph_breaks=False):
        yield


def pair(name: str, backend: Any = "aot_eager", **options: Any) -> tuple[Any, Any]:
    """A model as it is, and the same one compiled."""
    plain, model = (tiny_models.Model(name, tiny_models.SINGLE, seed=3, **options) for _ in range(2))
    layers = list(model.children())
    assert len(compile_blocks(layers, map(type, layers), backend)) == 2
    return plain, model


def gradients(model: Any, inputs: Any, labels: Tensor, seed: int = 0) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model.loss_fn(model(inputs), labels)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def require_equal(
    plain: Any, model: Any, inputs: Any, labels: Tensor, rtol: float = 1e-5, seed: int = 0
) -> None:
    pairs = zip(gradients(model, inputs, labels, seed), gradients(plain, inputs, labels, seed), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


def test_inductor() -> None:
    """The compiler of runs: one graph for two blocks, and the same names of parameters."""
    plain, model = pair("llama", "inductor")
    ids, labels = tiny_models.batch("llama", 2)
    for _ in range(2):
        require_equal(plain, model, ids, labels)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_documents_apart(recompute: str) -> None:
    """Packs that differ from micro-batch to micro-batch do not compile anything anew."""
    plain, model = pair("llama", recompute=recompute)
    ids, labels = tiny_models.batch("llama", 2)
    for cut in (3, 5, 8):
        length = ids.shape[1]
        row = torch.cat((torch.arange(cut), torch.arange(length - cut)))
        positions = torch.stack((row, torch.arange(length)))
        pack = (ids, positions)
        with torch._dynamo.config.patch(error_on_recompile=cut > 3):
            require_equal(plain, model, pack, labels)
    assert counters["stats"]["unique_graphs"] == 1


def test_dropout_masks_are_those_of_a_block_as_it_is() -> None:
    """They are drawn between graphs, from the generator that the ranks share."""
    plain, model = pair("llama-dropout")
    ids, labels = tiny_models.batch("llama-dropout", 2)
    for seed in range(2):
        require_equal(plain, model, ids, labels, seed=seed)


def test_bfloat16() -> None:
    plain, model = pair("llama-tied", dtype=torch.bfloat16)
    require_equal(plain, model, *tiny_models.batch("llama-tied", 2), rtol=0.02)


@pytest.mark.parametrize("name", ["llama-dropout", "llama"])
def test_the_backward_is_divided(name: str) -> None:
    """The first part gives no parameter a gradient, the second gives all of them theirs."""
    split = WeightGradients()
    plain, model = pair(name, split=split)
    ids, labels = tiny_models.batch(name, 2)
    for key in ((0, 0), (0, 1)):
        expected = gradients(plain, ids, labels)[1:]
        model.zero_grad()
        torch.manual_seed(0)
        loss = model.loss_fn(model(ids), labels)
        with split.deferring(key):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        with split.delivering(key) as rest:
            assert rest is not None
            rest.backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters(kind: Literal["lora", "dora"]) -> None:
    spec = replace(tiny_models.Model("llama").spec, adapter=Adapter(type=kind, rank=2))
    loss, (ids, labels) = families.loss(spec, tiny_models.SINGLE), tiny_models.batch("llama", 2)
    found = []
    for compiled in (False, True):
        listed = families.layers(spec, tiny_models.SINGLE, dtype=torch.float32, seed=3, pad_multiple=1)
        model = nn.Sequential(*(entry.build() for entry in listed))
        if compiled:
            compile_blocks(model, map(type, model), "aot_eager")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name or "magnitude" in name)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        loss(model(ids), labels).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert counters["stats"]["unique_graphs"] <= 2  # the first block's input needs no gradient
    assert found[0]
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5)


def _fails(graph: Any, inputs: Any) -> Any:
    raise NotImplementedError("no such device")


def test_a_block_that_cannot_be_compiled_runs_as_it_is() -> None:
    plain, model = pair("llama", _fails)
    ids, labels = tiny_models.batch("llama", 2)
    with pytest.warns(UserWarning, match="Block runs as it is, not compiled: .*no such device"):
        require_equal(plain, model, ids, labels)
    require_equal(plain, model, ids, labels)


class Mixer(nn.Module):
    """A layer of someone's own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return x + torch.tanh(self.mix(x))


def test_layers_of_ones_own() -> None:
    """Modules whose class stands more than once are blocks; functions and single modules are not."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Mixer(), torch.relu, Mixer(), Mixer()]
    x = torch.randn(4, 8)

    def run() -> Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y

    expected, names = run(), [list(layer.state_dict()) for layer in (layers[0], layers[1])]
    assert compile_blocks(layers, map(type, layers), "aot_eager") == [layers[1], layers[3], layers[4]]
    torch.testing.assert_close(run(), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert [list(layer.state_dict()) for layer in (layers[0], layers[1])] == names
