"""A small model and an adapter whose start has changed it, made by PEFT itself, as a run reads both."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.checkpoint.formats.huggingface import names
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.config.adapter import peft_settings
from dsx.config.run import RunConfig
from dsx.errors import DsxError
from dsx.hub.model_structure import with_weights
from dsx.launch.processes import agree
from dsx.models.custom_code import without_code
from dsx.models.transformers_settings import first_line, quiet_transformers
from dsx.verify.subject import NOISE, VerifyJob


def started(job: VerifyJob, config: RunConfig, held: ExitStack) -> tuple[VerifyJob, dict[str, Tensor], str]:
    """A job at its adapter's start, if that changed the base. A collective call over all ranks.

    Returns the job, whose files are this rank's own until ``held`` ends, its weights, and what it does
    without, where a rank can make or write no such start.
    """
    start = "none" if config.model.adapter is None else config.model.adapter.start
    if start == "none":
        return job, {}, ""
    files, built, why = agree(partial(_made, job, start))
    if not why:
        try:
            changed = _reading(job, files, held.enter_context(TemporaryDirectory()))
        except OSError as error:
            why = first_line(error)
        said = [why] * dist.get_world_size()
        dist.all_gather_object(said, why)
        if not (why := next(filter(None, said), "")):
            return changed, built, ""
    return job, {}, f"the adapter's start ({why})"


def _made(job: VerifyJob, start: str) -> tuple[dict[str, bytes], dict[str, Tensor], str]:
    """What :func:`_made_by_peft` gives, or why it gives nothing."""
    try:
        return *_made_by_peft(job, start), ""
    except DsxError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever this PEFT, or none, does on this machine
        return {}, {}, first_line(error)


def _made_by_peft(job: VerifyJob, start: str) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """Folders of a job's model and of an adapter on it, and the weights that a layout then begins with."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    config, found = job.config(), dict[str, Tensor]()
    with TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), quiet_transformers():
        model = with_weights(without_code(config.hf_config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOISE * torch.randn(parameter.shape) * (parameter.ndim == 1))
        model.save_pretrained(Path(folder) / "model")
        told = peft_settings(config.param_specs, config.model, None)
        told |= {"inference_mode": False, "init_lora_weights": start}
        made = get_peft_model(model, LoraConfig(**told))
        made.save_pretrained(Path(folder) / "adapter", save_embedding_layers=False)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    for name, values in made.get_base_model().state_dict().items():
        found[name.replace(".base_layer", "").replace(".modules_to_save.default", "")] = values
    found |= get_peft_model_state_dict(made, save_embedding_layers=False)

    def held(spec: Any) -> Tensor:
        whole = hf.join(spec, lambda own: next(found[n] for n in names.stored_names(spec, own) if n in found))
        assert whole is not None
        return whole.detach().clone()

    specs = config.param_specs
    return files, {spec.name: held(spec if spec.adapts else names.in_memory(spec)) for spec in specs}


def _reading(job: VerifyJob, files: Mapping[str, bytes], folder: str) -> VerifyJob:
    """The job on these files, which are written into a folder of this rank's own."""
    for name, file in files.items():
        (Path(folder) / name).parent.mkdir(exist_ok=True)
        (Path(folder) / name).write_bytes(file)
    content = copy.deepcopy(dict(job.content))
    model = {"path": f"{folder}/model", "weights": "load"}
    model |= {key: content["dsx"]["model"][key] for key in ("implementation", "vocab_multiple")}
    content["dsx"] |= {"model": model, "adapter": {"path": f"{folder}/adapter"}}
    return replace(job, content=content, resolved={})
