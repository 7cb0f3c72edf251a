"""What --fix writes without being asked twice never changes what DeepSpeed does.

For published shapes of configs, their random mutants and mistakes on purpose: what DeepSpeedConfig makes of a
config that it takes is equal before and after, and of one that is refused no wish is taken away.
"""

from __future__ import annotations

import copy
import json
import logging
import random

import pytest
from evidence import VALID
from test_evidence_mutations import mutants, typo
from test_mend import BASE, MISTAKES

from dsx.config.document import from_text
from dsx.config.keys import reference
from dsx.doctor import examine
from dsx.doctor.mend import settle
from often import often

# Taken by DeepSpeedConfig as it is written, and fatal when the engine is made or takes its first step: the
# engines of test_evidence_engines.py show it.
FATAL_STRINGS = {"gradient_clipping", "steps_per_print"}
FATAL_BLOCKS = {"optimizer", "scheduler"}
# Stored, and read by nothing: test_reference.py, test_dead_keys_are_read_by_nothing.
DEAD = {"_param_dict", "disable_allgather"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def plain(value):
    """A config object of DeepSpeed's as values that can be compared."""
    if hasattr(value, "model_dump"):
        fields = type(value).model_fields
        # The former name of a field keeps what was written; the field itself is what is read.
        old = {name for name, field in fields.items() if (field.json_schema_extra or {}).get("deprecated")}
        return value.model_dump(exclude=old)
    return plain_dict(vars(value)) if hasattr(value, "__dict__") else value


def plain_dict(values):
    return {name: plain(value) for name, value in values.items()}


def resolved(config):
    """What DeepSpeed makes of ``config``; None if it refuses it, at once or when the engine is made."""
    from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum

    if any(isinstance(config.get(key), str) for key in FATAL_STRINGS):
        return None
    if any(is_fatal(block, config.get(block)) for block in FATAL_BLOCKS) or muon_at_3(config):
        return None
    try:
        parsed = vars(DeepSpeedConfig(copy.deepcopy(config)))
        # The engine asks for the dtypes of these names.
        [DtypeEnum(parsed[name]) for name in ("grad_accum_dtype", "param_dtype") if parsed[name]]
    except Exception:  # noqa: BLE001 (whatever it raises, it refuses)
        return None
    return plain_dict({name: value for name, value in parsed.items() if name not in DEAD})


def muon_at_3(config):
    """Muon with ZeRO-3's default way of reducing, which is a ValueError."""
    zero, optimizer = config.get("zero_optimization"), config.get("optimizer")
    if not isinstance(zero, dict) or not isinstance(optimizer, dict):
        return False
    return optimizer.get("type") == "Muon" and zero.get("stage") == 3 and "reduce_scatter" not in zero


def is_fatal(name, block):
    """An optimizer or schedule that cannot be made: a name, a parameter or a number that it does not know."""
    if not isinstance(block, dict) or "type" not in block:
        return False  # DeepSpeed makes none, and goes on
    wrong = {"unknown-key", "wrong-case", "misplaced-key", "quoted", "not-a-choice", "optimizer-name", "null"}
    wrong |= {"scheduler", "max-grad-norm", "optimizer-parameter", "wrong-type"}
    found = examine({"train_batch_size": 8, name: block}, runner="deepspeed").errors
    return any(f.check in wrong and f.path[:1] == (name,) for f in found)


def leaves(node):
    """Values that ask for something, as text without quotes, case and punctuation."""
    if isinstance(node, dict | list):
        items = node.values() if isinstance(node, dict) else node
        return sorted(leaf for item in items for leaf in leaves(item))
    word = str(node).strip().lower()
    try:
        word = f"{float(word):g}"
    except ValueError:
        word = DTYPES.get(word, "".join(filter(str.isalnum, word)))
    return [] if word in ("none", "false", "auto", "0", "null", "") else [word]


def mended(config, runner="deepspeed", unsafe=False):
    text = json.dumps(config)
    changed = settle(
        text, lambda text: examine(text, version="0.19.8", runner=runner).findings, unsafe=unsafe
    )
    return from_text(changed.after).config


def _renamed(node, key, word):
    node[word] = node.pop(key)


def _in_quotes(value):
    return value if isinstance(value, dict | str) else json.dumps(value)


# Kind of mistake -> the change of ``key`` in ``node``.
CHANGES = {
    "typo": lambda config, node, key, rng: _renamed(node, key, typo(key, rng)),
    "case": lambda config, node, key, rng: _renamed(node, key, key.upper()),
    "quoted": lambda config, node, key, rng: node.update({key: _in_quotes(node[key])}),
    "null": lambda config, node, key, rng: node.update({key: None}),
    "auto": lambda config, node, key, rng: node.update({key: "auto"}),
    "up": lambda config, node, key, rng: config.update({key: node.pop(key)}),
    "word": lambda config, node, key, rng: node.update(
        {key: rng.choice([str.upper, str.title, " {}".format])(str(node[key]))}
    ),
    "unwrap": lambda config, node, key, rng: node.update(
        {key: next(iter(node[key].values()), None) if isinstance(node[key], dict) else [node[key]]}
    ),
    "swap": lambda config, node, key, rng: node.update(
        {key: node[key][::-1] if isinstance(node[key], list) else {"value": node[key]}}
    ),
}


def randomly_wrong(config, rng):
    """``config`` with one to three things wrong, somewhere."""
    config = copy.deepcopy(config)
    for _ in range(rng.randint(1, 3)):
        nodes = [config]
        for node in nodes:
            nodes += [value for value in node.values() if isinstance(value, dict)]
        node = rng.choice([node for node in nodes if node])
        key = rng.choice(sorted(node))
        CHANGES[rng.choice(sorted(CHANGES))](config, node, key, rng)
    return config


def candidates():
    rng = random.Random(21)
    for _, _, config in mutants():
        yield config
    for name in sorted(MISTAKES):
        config = copy.deepcopy(BASE)
        MISTAKES[name](config)
        yield config
    for config in VALID.values():
        for _ in range(40):
            yield randomly_wrong(config, rng)


@pytest.mark.parametrize("part", often(range(5), 5))
def test_a_safe_fix_changes_nothing_that_works(part):
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    accepted = changed = 0
    for config in list(candidates())[part::5]:
        after = mended(config)
        if after == config:
            continue
        changed += 1
        before = resolved(config)
        if before is None:
            lost = [leaf for leaf in leaves(config) if leaf not in leaves(after)]
            assert not lost, (config, after)
        else:
            accepted += 1
            assert resolved(after) == before, (config, after)
    assert changed > 30
    assert accepted > 3


DEPRECATED = [row for row in reference().rows if row.status == "deprecated"]
# What people write for a boolean; and what stands beside it, which may be what replaces the key.
BOOLEANS = (True, False, None, "true", "False", 1, 0, "auto")
BESIDE = (
    {},
    {"cpu_offload": True, "overlap_comm": True},
    {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/x"}},
    {"offload_optimizer": {"device": "none", "pin_memory": False}, "offload_param": {"pin_memory": True}},
    {"stage3_gather_16bit_weights_on_model_save": True},
)


def with_deprecated(key):
    """Configs that have ``key``, with each kind of value and neighbour."""
    owner, _, last = key.path.rpartition(".")
    for beside in BESIDE:
        for value in BOOLEANS:
            config = {"train_batch_size": 8, "gradient_clipping": 1.0}
            config["zero_optimization"] = {"stage": 3, **beside}
            node = config[owner] if owner else config
            node[last] = {"enabled": value} if "object" in key.kinds else value
            yield config


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("key", DEPRECATED, ids=lambda key: key.path)
def test_a_deprecated_key_is_mended_as_deepspeed_reads_it(key, unsafe):
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    owner, _, last = key.path.rpartition(".")
    gone = 0
    for config in with_deprecated(key):
        for runner in ("deepspeed", "trainer"):
            before, after = resolved(config), mended(config, runner, unsafe)
            if before is not None:
                assert resolved(after) == before, (config, after)
                gone += last not in (after[owner] if owner else after)
    assert gone > len(BESIDE), key.path


@pytest.mark.parametrize("config", [{"allgather_size": 1000}, {}])
@pytest.mark.parametrize("switch", [True, False])
def test_the_form_of_zero_before_2020_is_mended_as_deepspeed_reads_it(config, switch):
    config = {"train_batch_size": 8, "zero_optimization": switch, **config}
    after = mended(config)
    assert isinstance(after["zero_optimization"], dict)
    assert resolved(after) == resolved(config)
