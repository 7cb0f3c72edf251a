"""The proof at start: what a run's layout is known by, and where that is kept.

Before a run builds its model, a small model of its config takes two steps in the run's own process groups
(:mod:`dsx.verify.small_step`), unless an earlier start with the same config has shown the same.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from dsx.config.run import RunConfig
from dsx.kept import cache_folder, code_version, keep
from dsx.launch.processes import agree
from dsx.parallel.mesh import AXES, Mesh
from dsx.terminal import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How near a layout's small model came to one process.

    Attributes:
        layout: The degrees above 1, in words.
        loss: Relative difference of the loss.
        norm: The same of the global gradient norm; None if the engine reports none.
        gradient: Largest difference of a gradient, relative to its tensor's largest element.
        why_not: Why there is no proof; empty if there is one.
        without: What of the run the small model does without, in words.
    """

    layout: str
    loss: float = 0.0
    norm: float | None = None
    gradient: float = 0.0
    seconds: float = 0.0
    why_not: str = ""
    without: str = ""

    @property
    def words(self) -> str:
        if self.why_not:
            return f"not: {self.why_not}"
        norm = "" if self.norm is None else f", norm {self.norm:.0e}"
        took = seconds(self.seconds) if self.seconds else "kept from an earlier start"
        off = f"loss {self.loss:.0e}{norm}, gradients {self.gradient:.0e}"
        without = f", without {self.without}" if self.without else ""
        return f"{self.layout} as one process{without}: {off} ({took})"


def known_proof(config: RunConfig) -> Proof | None:
    """What is known of a run's layout before it is tried, or None. A collective call over all ranks."""
    if config.dsx.proof == "off":
        return Proof(layout=layout_words(config.mesh), why_not='"dsx.proof" is off')
    return agree(lambda: _kept(config))


def is_proved(config: RunConfig) -> bool:
    """Whether an earlier start on this machine has proved the layout of a config."""
    return config.dsx.proof != "off" and _kept(config) is not None


def _kept(config: RunConfig) -> Proof | None:
    try:
        return Proof(**json.loads(_place(config).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def keep_proof(config: RunConfig, proof: Proof) -> None:
    """Keep a proof in the user's cache, by config, degrees and versions."""
    keep(_place(config), json.dumps(asdict(proof)))


def layout_words(mesh: Mesh) -> str:
    """The degrees above 1."""
    degrees = [(axis.title, mesh.degree(axis.name)) for axis in reversed(AXES)]
    return " x ".join(f"{title} {degree}" for title, degree in degrees if degree > 1) or "one rank"


_NEUTRAL = (
    "tracking",
    "faults",
    "outer",
    "profile",
    "profile_micro_batches",
    "memory_check",
    "optimizer_bytes",
)


def _place(config: RunConfig) -> Path:
    """Where a proof is kept: by all of the config that says how it computes, degrees, device and versions."""
    content = config.resolved()
    block = {key: value for key, value in content["dsx"].items() if key not in _NEUTRAL}
    block["train"] = {"freeze": block["train"].get("freeze"), "seed": config.dsx.train.seed}
    block["data"] = {
        "apart": config.dsx.data.keeps_apart,
        "pictures": config.dsx.data.pictures,
        "formats": [part.format for part in config.dsx.data.parts()],
        "sequence_length": config.sequence_length,
    }
    block["model"] = {**block["model"], "path": None, "config": config.hf_config}
    adapter, peft = config.model.adapter, ""  # which makes the small model of an adapter that began otherwise
    if adapter is not None and adapter.start != "none":
        with suppress(PackageNotFoundError):
            peft = version("peft")
    said = (
        content | {"dsx": block},
        repr((adapter, peft)),  # an adapter's folder is in the config by its path alone
        repr((config.program, config.stage_map)),  # a schedule's file is in the config by its name alone
        getattr(config.model, "tensor_plan", None),
        config.mesh.axes,
        get_accelerator().device_name(),
    )
    name = hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()[:32]
    return cache_folder("proofs") / code_version("**/*.py", "**/*.toml") / f"{name}.json"
