"""What dsx makes of transformers' families: all of them by their configs alone, and one model in detail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from dsx.errors import DsxError
from dsx.hub.composite import language_config
from dsx.hub.model_structure import check_one_stack
from dsx.hub.read import derived_patterns, hub_model, known_of
from dsx.models.flops import multiplied
from dsx.models.hf_config import FAMILIES
from dsx.models.spec import ContextMethod, HubModel
from dsx.models.transformers_settings import first_line, quiet_transformers

_MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """A causal language model family of the installed transformers.

    Attributes:
        implementation: Whose modules ``"implementation": "auto"`` takes; None if dsx refuses the family.
        tensor_plan: Whether transformers or dsx's table has a tensor plan for it; one is derived otherwise.
        refused: Why dsx refuses it; None if it does not, as far as has been looked.
        no_sequence: Why sequence parallelism is refused; None if it is not.
    """

    family: str
    implementation: str | None
    tensor_plan: bool
    refused: str | None = None
    no_sequence: str | None = None


def family_rows(*, probed: bool = False) -> Iterator[FamilyRow]:
    """Every family, by what its config says and, if ``probed``, by a small model of it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with quiet_transformers():
        for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            yield _row(family, probed=probed)


def _row(family: str, *, probed: bool) -> FamilyRow:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    known = known_of(family)
    plan = bool(getattr(kind, "base_model_tp_plan", None) or known.get("plan") or known.get("cuts"))
    refused, no_sequence = None, known.get("no_sequence")
    try:
        described = kind()
        check_one_stack(described)
        if probed:
            from dsx.verify.alone import probe  # here: a list needs no DeepSpeed

            found = probe({**described.to_dict(), "model_type": family})
            refused, no_sequence = found.differs, found.no_sequence
    except DsxError as error:
        refused = f"{error.what}; {error.fix}"
    except Exception as error:  # noqa: BLE001 - each family refuses its own config in its own way
        refused = f"transformers cannot make its config ({first_line(error)})"
    own = family in FAMILIES
    implementation = "dsx" if own else None if refused else "transformers"
    return FamilyRow(
        family=family,
        implementation=implementation,
        tensor_plan=plan or own,
        refused=None if own else refused,
        no_sequence=None if own or refused else no_sequence,
    )


def report(config: Mapping[str, Any], tensor_plan: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """What dsx makes of one model, as JSON values.

    Args:
        config: Content of its config.json.
        tensor_plan: As of :func:`dsx.hub.read.hub_model`.

    Raises:
        ModelError: dsx refuses the model; names the reason.
    """
    from dsx.hub.context_probe import no_context, no_selective  # here: as above
    from dsx.verify.alone import probe

    config = language_config(config)
    model = hub_model(config, tensor_plan)
    derived = derived_patterns(model)
    try:
        tried: dict[str, Any] = asdict(probe(config, tensor_plan))
    except DsxError as error:
        tried = {"not_tried": error.what}
    legal = [ranks for ranks in range(1, _MOST_RANKS + 1) if model.uncut(ranks) is None]
    heads, pairs = model.heads or (None, None)
    flops = model.left_whole(lambda spec: multiplied(model, spec) if len(spec.shape) > 1 else 0.0)
    return {
        "family": model.family,
        "implementation": "dsx" if model.family in FAMILIES else "transformers",
        "parameters": sum(spec.numel for spec in model.params),
        "blocks": model.num_layers,
        "kinds_of_blocks": len(set(model.alike)),
        "layers": list(dict.fromkeys(model.kinds)),
        "tied_embeddings": model.tied_embeddings,
        "heads": heads,
        "key_value_heads": pairs,
        "tensor": legal,
        "not_cut": model.uncut(2),
        "derived_plan": derived,
        "experts": _experts(model),
        "no_context": {method: no_context(model, 2, method) for method in get_args(ContextMethod)},
        "mixing": _mixing(model),
        "no_selective": no_selective(model.config),
        "whole": [
            {"module": path, "parameters": share, "work": flops.get(path, 0.0)} for path, share in model.whole
        ],
        "probe": tried,
    }


def _experts(model: HubModel) -> dict[str, Any] | None:
    """Experts of a layer, and how many ranks may hold them together; None without stacks of experts."""
    counts = {spec.shape[0] for spec in model.params if spec.experts == 0}
    legal = [ranks for ranks in range(1, _MOST_RANKS + 1) if model.unshared_experts(ranks) is None]
    return {"of_a_layer": sorted(counts), "ranks": legal} if counts else None


def _mixing(model: HubModel) -> dict[str, dict[str, Any]]:
    """Modules that need tokens of other ranks of a context axis, and shares of blocks' parameters."""
    from dsx.hub.context_probe import mixers, no_context  # here: as above

    if no_context(model, 2, "all_gather") is not None:
        return {}
    around, found, total = mixers(model.config, 2), defaultdict[str, float](float), 0
    passing = {path for each in around for path in each.passing}
    first = model.kinds.index("Block")
    for spec in model.params:
        if model.kinds[spec.layer] == "Block":
            name, total = spec.name.partition(".block.")[2], total + spec.numel
            for path in around[spec.layer - first].paths:
                found[path] += spec.numel * name.startswith(f"{path}.")
    return {
        path: {"parameters": size / total, "passes_states": path in passing}
        for path, size in sorted(found.items())
    }
