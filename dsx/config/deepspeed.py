"""What dsx refuses in DeepSpeed's own keys before a run, and what it reads from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsx.config import refusals
from dsx.config.document import from_mapping
from dsx.config.keys import REFERENCE, TRUE
from dsx.config.refusals import ABSENT, Context, Finding
from dsx.config.wording import at, dotted
from dsx.errors import ConfigError, KeyPlace
from dsx.models.flops import Precision
from dsx.parallel.mesh import Mesh

Json = Mapping[str, Any]

# The batch of the resolved mesh (dsx/config/batch.py), which comes next, says these better.
_LATER = ("batch-missing", "batch-triple")


def deepspeed_problems(config: Json) -> list[ConfigError]:
    """Everything wrong with DeepSpeed's part of a config that dsx is to run, whatever the mesh is."""
    found = refusals.errors(_context(config))
    if found is None:
        # A key or value that nothing takes ends the run here; the doctor says what may be meant.
        from dsx.doctor.examine import examine

        found = list(examine(config, runner="dsx", version=REFERENCE).errors)
    return [as_error(finding) for finding in found if finding.check not in _LATER]


def mesh_problems(config: Json, mesh: Mesh) -> list[ConfigError]:
    """What dsx cannot do on this mesh, of keys that are right by themselves."""
    rules = [rule for rule in refusals.refused() if rule.needs_mesh]
    return [as_error(finding) for finding in refusals.apply(rules, _context(config, mesh))]


def pipeline_problems(config: Json, mesh: Mesh) -> list[ConfigError]:
    """What dsx's engine cannot do of a plain DeepSpeed config, one without a ``dsx`` block."""
    context = _context(config, mesh)
    found = [*refusals.apply(refusals.refused(), context, by=("pipeline", "initialize"))]
    found += refusals.apply([rule for rule in refusals.refused() if rule.check == "data-types"], context)
    found += [finding for finding in refusals.check_loss_scale(context) if finding.severity == "error"]
    return [as_error(finding) for finding in found]


def _context(config: Json, mesh: Mesh | None = None) -> Context:
    degrees = None if mesh is None else {**dict(mesh.axes), "replicas": mesh.num_replicas, "size": mesh.size}
    return Context(source=from_mapping(config), runner="dsx", version=REFERENCE, mesh=degrees)


def as_error(finding: Finding) -> ConfigError:
    """The error that refuses what ``finding`` is about."""
    name = dotted(finding.path)
    is_written = finding.value is not ABSENT
    where = at(name, finding.value) if is_written else name
    value = finding.value if is_written else None
    return ConfigError(KeyPlace(where, finding.path, value), finding.why, finding.fix)


def zero_stage(config: Json) -> int:
    """ZeRO stage of a checked config; 0 when absent."""
    stage = _block(config, "zero_optimization").get("stage", 0)
    return stage if isinstance(stage, int) and not isinstance(stage, bool) else 0


def offloads_optimizer(config: Json) -> bool:
    """Whether a checked config has the optimizer's states on the host."""
    block = _block(_block(config, "zero_optimization"), "offload_optimizer")
    return str(block.get("device") or "none") != "none"


def precision(config: Json) -> Precision:
    """What a checked config trains in."""
    if _is_on(config, "fp16"):
        return "fp16"
    return "bf16" if _is_on(config, "bf16") or _is_on(config, "bfloat16") else "fp32"


def _is_on(config: Json, name: str) -> bool:
    """Whether DeepSpeed, which reads these blocks with pydantic, takes a block for enabled."""
    return str(_block(config, name).get("enabled")).lower() in TRUE


def optimizer_notes(config: Json) -> Iterator[str]:
    """Notes on builds that DeepSpeed would start on a machine without a GPU."""
    optimizer = _block(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    if kind in refusals.names("compiled") and not _block(optimizer, "params").get("torch_adam"):
        fix = " (optimizer.params.torch_adam = true compiles nothing)" if kind.startswith("adam") else ""
        yield f"optimizer {optimizer['type']}: DeepSpeed compiles its own at first use, a minute or two{fix}"


def _block(config: Json, key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}
