"""Stock pipelines without ZeRO, whose optimizer states have no names: as the ranks held them, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from checkpoint.stock_checkpoints import VOCABULARY, WIDTH, Embedding, head, loss_of, read_entry
from dsx.checkpoint.formats.deepspeed.cut import Rules
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.errors import CheckpointError

EVERY = ["up.weight", "up.bias", "down.weight"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


def again(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x + module(x)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def layers_of(text: str) -> list[Any]:
    """One letter per layer; capitals are tied, and H and T use a module without a file of their own."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    square = (nn.Linear, WIDTH, WIDTH, False)
    made = {
        "e": lambda: LayerSpec(Embedding),
        "E": lambda: TiedLayerSpec("embed", Embedding),
        "H": lambda: TiedLayerSpec("embed", Embedding, forward_fn=head),
        "h": lambda: LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False),
        "b": lambda: LayerSpec(Block),
        "f": lambda: LayerSpec(Frozen),
        "B": lambda: TiedLayerSpec("block", Block, tied_weight_attr=EVERY),
        "n": lambda: LayerSpec(nn.LayerNorm, WIDTH),
        "s": lambda: LayerSpec(*square),
        "S": lambda: TiedLayerSpec("square", *square),
        "T": lambda: TiedLayerSpec("square", *square, forward_fn=again),
        "x": lambda: double,
    }
    return [made[letter]() for letter in text]


def groups_of(module: nn.Module, kind: str) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    if kind == "decay":
        return [
            {"params": [p for p in trained if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "lr": 0.02, "weight_decay": 0.0},
        ]
    return [{"params": trained, "lr": 0.01}]


def optimizer_of(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = groups_of(module, kind)
    return torch.optim.SGD(groups) if kind == "stateless" else torch.optim.AdamW(groups)


def train_and_save(rank: int, world_size: int, folder: Path, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Train each pipeline two steps; {case: {name: {state: tensor}}} of what this stage holds."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for text, kind in cases:
        torch.manual_seed(3)
        module = PipelineModule(
            layers=layers_of(text),
            num_stages=world_size,
            loss_fn=loss_of,
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        optimizer = optimizer_of(module, kind)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config | {"zero_allow_untested_optimizer": True}
        )
        for step in range(2):
            tokens = torch.randint(VOCABULARY, (2, 2, 5), generator=torch.Generator().manual_seed(step))
            engine.train_batch(iter([(one, one.roll(1, 1)) for one in tokens]))
        engine.save_checkpoint(str(folder / f"{text}-{kind}"), tag="saved")
        found[f"{text}-{kind}"] = {
            name: {
                state: value.clone()
                for state, value in {"weight": p.detach(), **optimizer.state.get(p, {})}.items()
                if state != "step"
            }
            for name, p in module.named_parameters()
        }
    return found


PROVABLE = [
    ("ebbbbh", "one"),
    ("ebbbbh", "decay"),
    ("EbbbbnH", "one"),
    ("EbbbbnH", "decay"),
    ("exbbxbbnh", "one"),
    ("ebfh", "one"),
]
TOLD = {
    ("esssssh", "one"): (),  # a square may be used again after the last file
    ("essssSTh", "one"): (("square", (5, 6)),),
    ("ebbbbBBh", "one"): (("block", (5, 6)),),  # two files alike
    ("EbBbBbH", "one"): (("embed", (0, 6)), ("block", (2, 4))),  # two tied modules
    ("ebbh", "stateless"): (),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pipelines")
    return folder, ranks.run(train_and_save, 2, folder, [*PROVABLE, *TOLD])


def check(folder: Path, lives: list[dict[str, Any]], rules: Rules | None) -> None:
    """Every state is, bit for bit, what a stage held under that name."""
    catalog = catalog_of(folder / "saved", rules)
    held = catalog.by_key
    homes = {alias: entry.name for entry in catalog.entries for alias in entry.aliases}
    count = 0
    for name, states in (item for live in lives for item in live[folder.name].items()):
        own = name
        if (own, "weight") not in held:  # a tied module that nobody named: by its first layer
            own = f"0.{name.split('.', 2)[2]}"
        for state, expected in states.items():
            found = read_entry(catalog, held[homes.get(own, own), state])
            assert torch.equal(found, expected), (name, state)
            count += 1
    assert count >= len(catalog.entries)


@pytest.mark.parametrize("case", PROVABLE, ids="-".join)
def test_states_have_the_names_of_the_ranks(saved, case) -> None:
    folder, lives = saved
    check(folder / "-".join(case), lives, None)


@pytest.mark.parametrize("case", TOLD, ids="-".join)
def test_what_may_be_tied_is_asked_for(saved, case) -> None:
    """The files leave more than one possibility, or none of those that dsx tries; the user's word decides."""
    folder, lives = saved
    place = folder / "-".join(case)
    with pytest.raises(CheckpointError, match=r"optimizer: its states have shapes .*--tied none"):
        catalog_of(place / "saved")
    check(place, lives, Rules(ties=TOLD[case]))


@pytest.mark.parametrize(
    ("case", "ties", "problem"),
    [
        (
            ("EbbbbnH", "one"),
            (("embed", (0, 4)),),
            "layers 0 and 4 have other tensors, or not the same bytes",
        ),
        (("EbbbbnH", "one"), (("embed", (7,)),), "no file has a tensor of one of these layers"),
        (("EbbbbnH", "one"), (("embed", (0, 6)), ("e", (0,))), "a layer has two keys"),
        (("EbbbbnH", "one"), (), "no order of the layers' parameters has"),
        (("ebbbbh", "one"), (("block", (1, 2)),), "layers 1 and 2 have other tensors, or not the same bytes"),
        (("ebbbbh", "one"), (("block", (1, 6)),), "no order of the layers' parameters has"),
    ],
)
def test_a_word_that_the_files_deny(saved, case, ties, problem) -> None:
    with pytest.raises(CheckpointError, match=problem):
        catalog_of(saved[0] / "-".join(case) / "saved", Rules(ties=ties))
