"""Profiles made of numbers, for tests of what is chosen from them."""

from __future__ import annotations

from random import Random

from dsx.checkpoint.claims import model_of
from dsx.models.flops import layer_flops
from dsx.models.presets import find_preset
from dsx.planner.profile import Conditions, LayerCost, Profile

CONDITIONS = Conditions(
    model="some",
    micro_batch_size=1,
    sequence_length=2048,
    tensor=1,
    sequence_parallel=False,
    precision="fp32",
    device="CPU",
    dsx="0",
)


def cost(
    seconds: float, *, kept_bytes: int = 0, pending_bytes: int = 0, boundary_bytes: int = 0
) -> LayerCost:
    """A layer whose forward, input and weight gradients take a third each."""
    third = seconds / 3
    return LayerCost(
        forward_seconds=third,
        backward_seconds=2 * third,
        backward_input_seconds=third,
        backward_weight_seconds=third,
        kept_bytes=kept_bytes,
        pending_bytes=pending_bytes,
        boundary_bytes=boundary_bytes,
    )


def gpt2(sequence_length: int) -> list[LayerCost]:
    """GPT-2's 16 layers, a second per 1e9 FLOPs of a token."""
    model = model_of(find_preset("gpt2", "gpt2").config)
    return [cost(flops / 1e9) for flops in layer_flops(model, sequence_length)]


def random_layers(count: int, seed: int) -> list[LayerCost]:
    """Uneven layers: some cost nothing, the parts of the backward differ."""
    rng, layers = Random(seed), []
    for _ in range(count):
        forward, first, second = (
            rng.choice((0.0, 1.0, 1.0, 2.0, 7.0)) * rng.uniform(0.5, 1.5) for _ in "FIW"
        )
        kept = rng.randrange(1, 100)
        layers.append(
            LayerCost(
                forward_seconds=forward,
                backward_seconds=first + second,
                backward_input_seconds=first,
                backward_weight_seconds=second,
                kept_bytes=kept,
                pending_bytes=rng.randrange(kept),
                boundary_bytes=10,
            )
        )
    return layers


def profile(layers: list[LayerCost], **more: object) -> Profile:
    """Of one recompute mode, unless ``layers`` of others are given by name."""
    modes = {"none": tuple(layers)} | more.pop("modes", {})
    return Profile(conditions=CONDITIONS, layers=modes, **more)
