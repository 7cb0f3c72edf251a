"""``dsx.zero``: what has no effect is refused, with the stage that gives it one."""

from __future__ import annotations

import pytest
from sample_config import changed

from dsx.config.resolve import resolve
from dsx.config.schema import ZeroConfig
from dsx.errors import ConfigError

REDUCE, KEEP = "dsx.zero.reduce", "dsx.zero.keep_gathered_bytes"


@pytest.mark.parametrize(("key", "value", "right"), [(REDUCE, "micro_batch", 2), (KEEP, 4096, 3)])
def test_each_setting_belongs_to_one_stage(key: str, value: str | int, right: int) -> None:
    for stage in range(4):
        config = changed({key: value, "zero_optimization.stage": stage})
        if stage == right:
            zero = resolve(config, world_size=1).dsx.zero
            assert getattr(zero, key.rpartition(".")[2]) == value
            continue
        with pytest.raises(ConfigError, match=f"ZeRO stage {right}") as caught:
            resolve(config, world_size=1)
        assert key in str(caught.value)


def test_defaults_suit_every_stage() -> None:
    for stage in range(4):
        assert resolve(changed({"zero_optimization.stage": stage}), world_size=1).dsx.zero == ZeroConfig()


@pytest.mark.parametrize(("key", "value"), [(KEEP, -1), (KEEP, "1 GiB"), (REDUCE, "never")])
def test_other_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve(changed({key: value, "zero_optimization.stage": 3}), world_size=1)
