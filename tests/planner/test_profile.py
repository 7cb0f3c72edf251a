"""Profiles: JSON and back, refusals, sums over stages, bytes alive against a count of activations."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
from profiles import CONDITIONS, cost, profile, random_layers

from dsx.errors import ConfigError
from dsx.models.hf_config import model_spec
from dsx.models.presets import find_preset
from dsx.planner.partition_search import peak_bytes
from dsx.planner.profile import Conditions, Profile, action_costs, digest, stage_costs
from dsx.schedules.builders import NAMES, build, default_chunks
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import peak_activations

MEASURED = profile(
    random_layers(5, 1),
    modes={"full": tuple(random_layers(5, 2))},
    latency_seconds=1e-5,
    bytes_per_second=1e9,
)


def test_json_round_trip():
    assert Profile.from_json(MEASURED.to_json()) == MEASURED


def test_json_writes_equal_neighbours_once():
    text = profile([cost(1.0), *[cost(2.0)] * 70, cost(1.0)]).to_json()
    assert [row["count"] for row in json.loads(text)["layers"]["none"]] == [1, 70, 1]
    assert Profile.from_json(text).num_layers == 72


def edited(**changes: object) -> str:
    return json.dumps(json.loads(MEASURED.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no profile"),
        ("[]", "no profile"),
        ("{}", "no profile"),
        (edited(version=2), "version = 2"),
        (edited(conditions={}), "no profile"),
        (edited(layers={}), "no layers"),
        (edited(layers={"none": []}), "no layers"),
        (edited(layers={"none": [{"count": 1, "seconds": 2}]}), "no profile"),
        (edited(latency_seconds=-1), "below 0"),
        (edited(bytes_per_second="fast"), "bytes_per_second = .fast."),
        (edited(bytes_per_second=math.nan), "bytes_per_second = nan"),
        (profile([cost(-1.0)]).to_json(), "below 0"),
        (profile([cost(1.0)], modes={"full": (cost(1.0),) * 2}).to_json(), "not equally many"),
    ],
)
def test_refused_texts(text, said):
    with pytest.raises(ConfigError, match=said) as refused:
        Profile.from_json(text, name="p.json")
    assert str(refused.value).startswith("p.json")
    assert "measure anew" in refused.value.fix


@pytest.mark.parametrize("name", [field.name for field in fields(Conditions)])
def test_other_conditions_are_refused_by_name(name):
    value = getattr(CONDITIONS, name)
    other = (not value) if isinstance(value, bool) else value * 2
    wanted = replace(CONDITIONS, **{name: other})
    with pytest.raises(ConfigError, match=f"{name} = {value}: .*{other}"):
        MEASURED.require(wanted, name="p.json")
    MEASURED.require(wanted, name="p.json", ignore=(name,))
    MEASURED.require(CONDITIONS, name="p.json")


def test_a_mode_that_was_not_measured():
    with pytest.raises(ConfigError, match="recompute selective: only none, full was measured"):
        MEASURED.require_mode("selective", name="p.json")


def test_digest_is_of_every_number():
    model = model_spec(find_preset("llama", "tiny").config)
    same = model_spec(find_preset("llama", "tiny").config)
    assert digest(model, vocab_multiple=64) == digest(same, vocab_multiple=64)
    others = {digest(model, vocab_multiple=1), digest(replace(model, num_kv_heads=8), vocab_multiple=64)}
    assert digest(model, vocab_multiple=64) not in others
    assert len(others) == 2


def test_transfer_takes_latency_and_the_largest_boundary():
    measured = profile(
        [cost(1.0, boundary_bytes=500), cost(1.0, boundary_bytes=2000), cost(1.0)],
        latency_seconds=0.25,
        bytes_per_second=4000.0,
    )
    assert measured.transfer_seconds("none") == 0.75
    assert profile([cost(1.0, boundary_bytes=500)]).transfer_seconds("none") == 0.0


def test_stages_add_up():
    layers = random_layers(6, 3)
    stages = stage_costs(layers, (0, 1, 4, 6))
    costs = action_costs(stages, 0.5)
    by_op = costs.by_op(3)
    assert by_op[Op.FORWARD][1] == pytest.approx(sum(x.forward_seconds for x in layers[1:4]))
    assert by_op[Op.BACKWARD][2] == pytest.approx(sum(x.backward_seconds for x in layers[4:]))
    assert by_op[Op.BACKWARD_INPUT][0] == layers[0].backward_input_seconds
    assert by_op[Op.BACKWARD_WEIGHT][0] == layers[0].backward_weight_seconds
    assert costs.transfer_seconds == 0.5
    assert stages[1].kept_bytes == sum(x.kept_bytes for x in layers[1:4])
    assert stages[2].pending_bytes == sum(x.pending_bytes for x in layers[4:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 3)])
def test_bytes_alive_are_activations_alive(name, p, m):
    """With a byte per activation until its W, bytes are what the schedule's own count says."""
    schedule = build(name, p, default_chunks(name), m)
    one = replace(cost(0.0), kept_bytes=1, pending_bytes=1)
    assert peak_bytes(schedule, [one] * schedule.num_stages) == peak_activations(schedule)


def test_bytes_by_hand():
    """0F0 keeps 10; I leaves 6; recomputation takes 5 more while I or B runs."""

    def row(*texts: str) -> tuple[Action, ...]:
        return tuple(map(Action.parse, texts))

    first = replace(cost(0.0), kept_bytes=10, pending_bytes=6, working_bytes=5)
    stages = first, cost(0.0, kept_bytes=3, pending_bytes=4)
    whole = Schedule("x", 1, 2, 1, (row("0F0", "1F0", "1B0", "0B0"),))
    assert peak_bytes(whole, stages) == (15,)  # 10 + 3, then 10 + 5 in 0B0
    divided = Schedule("x", 1, 2, 1, (row("0F0", "1F0", "1I0", "0I0", "0W0", "1W0"),))
    assert peak_bytes(divided, stages) == (19,)  # 10 + 3 + 0; 10 + 4; 10 + 4 + 5 in 0I0; 6 + 4
