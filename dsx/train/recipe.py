"""From a resolved config to an engine: the steps that all recipes with dsx's own models share."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import dsx
from dsx.checkpoint import store
from dsx.config.run import RunConfig
from dsx.config.schema import MEASURE, OWN
from dsx.config.wording import at
from dsx.data.batches import Batches, EvaluationBatches, Prefetched
from dsx.data.own import OwnCorpus, OwnPart, OwnText, as_text, require_same_everywhere
from dsx.data.text import Text, TextPart, prepare_text
from dsx.engine.engine import PipelineEngine
from dsx.engine.initialize import initialize
from dsx.engine.pipeline_module import PipelineModule
from dsx.errors import CheckpointError, ConfigError, DataError, DsxError
from dsx.fault_tolerance.guard import Guard
from dsx.launch.entry import ALONE, local_rank, rank
from dsx.launch.processes import agree
from dsx.memory.watch import check_memory
from dsx.models.spec import HubModel
from dsx.parallel.groups import Groups
from dsx.terminal import complain, printable, seconds
from dsx.train.building import build_layers
from dsx.train.monitor import Monitor, device_name, is_due
from dsx.train.proof import is_proved, known_proof
from dsx.train.run_folder import CONFIG, own_checkpoint, start_of
from dsx.waiting import Waiting

if TYPE_CHECKING:
    from dsx.planner.profile import Profile

__all__ = [
    "Guard",
    "Monitor",
    "build_engine",
    "build_model",
    "check_memory",
    "evaluate",
    "export",
    "is_due",
    "measure",
    "open_data",
    "prepare_data",
    "require_right_layers",
    "resume",
    "save",
    "training_batches",
]

PROFILE = "profile.json"

RunData = Text | OwnText | OwnCorpus
"""The text of ``dsx.data``, or a data set of one's own."""


def build_model(
    config: RunConfig,
    groups: Groups,
    *,
    load_layer: Callable[[int, nn.Module], None] | None = None,
    dynamic_shape: bool = False,
) -> PipelineModule:
    """This rank's layers of the config's model, once the layout has been proved to train as one process does.

    Raises:
        CheckpointError: The folder's weights do not fit the model.
        LayoutError: A small model of the config, in this layout, does not train as one process of
            transformers does (:func:`dsx.verify.small_step.prove`).
    """
    proof = known_proof(config)
    if proof is None:
        from dsx.verify.small_step import prove  # here: most starts have been proved before

        proof = prove(config, groups, quiet=groups.mute)
    adapter = None if config.dsx.adapter is None else config.dsx.adapter.path
    source = config.weights or adapter
    what = "making the layers" if source is None else f"reading the weights in {source}"
    with Waiting(what, quiet=groups.mute):
        pipeline = build_layers(config, groups, load_layer=load_layer, dynamic_shape=dynamic_shape)
    pipeline.proof = proof.words
    return pipeline


def require_right_layers(config: RunConfig) -> None:
    """Refuse a model of transformers' modules whose layers do not compute what transformers does.

    A small model of it is tried in one process, once for every config on this machine. Runs that prove their
    layout (:func:`build_model`) do more.

    Raises:
        ConfigError: Sequence parallelism would be wrong, or documents kept apart would not be.
        ModelError: The layers are.
    """
    if isinstance(config.model, HubModel):
        from dsx.verify.alone import require_probed  # here: dsx's own families need nothing of it

        cuts = config.dsx.parallel.sequence_parallel and config.mesh.tp > 1
        require_probed(config.model, sequence=cuts, documents=config.dsx.data.keeps_apart)


def measure(config: RunConfig, groups: Groups) -> RunConfig:
    """The config with everything chosen that it leaves to a profile; unchanged if it leaves nothing.

    Layers and links are measured (:func:`dsx.planner.profiler.measure_model`) unless ``dsx.profile`` names a
    saved profile; the profile goes to ``profile.json`` in the output folder. A run that continues from a
    checkpoint there uses that file again, so that its layout stays the checkpoint's. Rank 0 then chooses by
    simulated step (:func:`dsx.planner.choose.choose`), and the others get its choice; the config's notes say
    why. A collective call over all ranks, before the model is built; what the model's layers draw at random
    does not depend on it.

    Raises:
        CheckpointError: The profile cannot be written.
        ConfigError: A saved profile is of another run, naming what differs, or nothing stays within
            ``dsx.schedule.activation_gib``, naming the nearest.
    """
    if not config.dsx.is_measured(config.mesh.pp):
        return config
    from dsx.planner import measured  # here: other runs need none of the planner
    from dsx.planner.profiler import measure_model

    own = config.output / PROFILE
    found: tuple[Path, Profile] | None = agree(lambda: _saved_profile(config, own))
    said = "used again"
    if found is None:
        began = time.perf_counter()
        with Waiting("measuring layers and links", quiet=groups.mute):
            found = own, measure_model(config, groups)
        text = found[1].to_json()
        agree(lambda: store.write_atomically(own, text.encode()))
        said = f"measured in {seconds(time.perf_counter() - began)}"
    path, profile = found
    with Waiting("choosing by simulated step", quiet=groups.mute):
        settled = agree(lambda: measured.settle(config, profile, path))
    return replace(settled, notes=(*settled.notes, f"dsx.profile: {said}: {path}"))


def build_engine(config: RunConfig, groups: Groups) -> PipelineEngine:
    """:func:`build_model` under the optimizer, precision, ZeRO stage and schedule of the config."""
    return initialize(model=build_model(config, groups), config=config)[0]


def prepare_data(config: RunConfig) -> tuple[Path, ...] | None:
    """Tokenise the config's text, once per machine, before any process group exists.

    The first rank of each machine, and of each island, does the work and gives a folder for each source; the
    others give None at once and wait for it in :func:`dsx.distributed`. Of a streamed text only the held-out
    part is tokenised. Whatever is wrong with the data or the output folder is found here, and layers that are
    not right, unless nothing is left to tokenise and the proof is to find them.

    Raises:
        CheckpointError: The output folder cannot be written.
        DataError: The text is missing, unreadable, empty or too short for one step.
    """
    islands = config.islands
    of_island = islands is not None and islands.together and rank() % islands.ranks == 0
    if local_rank() != 0 and not of_island:
        return None
    try:
        if config.dsx.data.source == OWN:
            raise DataError(
                at("dsx.data.source", OWN),
                "this program reads text, and the data of no other program",
                "name a text (files, a folder, a hub data set), or run the program that has the data",
            )
        store.require_writable(config.output / store.CHECKPOINTS)
        start_of(config)
        tokens = max(config.dsx.train.eval_tokens, config.tokens_per_step) + config.sequence_length + 1
        trial = partial(require_right_layers, config)
        unproved = config.dsx.proof == "off"
        if unproved:  # then nothing else looks at the layers
            trial()
        folders = prepare_text(
            config.dsx.data,
            config.output / "data",
            held_out_tokens=tokens,
            before=(lambda: None) if unproved or is_proved(config) else trial,  # before hours of text
        )
        corpus = _open(config, folders)
        training_batches(config, corpus, dp_rank=0)
        for part in corpus.held_out:
            _evaluation_batches(config, corpus, part, dp_rank=0)
    except DsxError as error:
        error.add_note(ALONE)
        raise
    return folders


def open_data(config: RunConfig, folders: tuple[Path, ...] | None) -> Text:
    """The text that :func:`prepare_data` made ready. A collective call over all ranks."""
    holder = [folders]
    dist.broadcast_object_list(holder, src=0)
    assert holder[0] is not None
    return _open(config, holder[0])


def training_batches(
    config: RunConfig, corpus: RunData, *, dp_rank: int, cursor: int = 0
) -> Batches | Prefetched:
    """Endless ``(inputs, labels)`` of one data-parallel rank, from sample ``cursor`` of its job on.

    A thread makes ``dsx.data.prefetch`` of them ahead, once the first is asked for. A streamed text continues
    from where :func:`resume` has put it, or where earlier batches have left it.
    """
    ahead, text = config.dsx.data.prefetch, as_text(corpus, config.dsx.data)
    batches = Batches(
        text.samples(cursor=cursor, in_flight=(ahead + 2) * config.samples_per_micro_step),
        micro_batch_size=config.micro_batch_size,
        accumulation=config.accumulation,
        dp=config.mesh.num_shares,
        dp_rank=dp_rank,
        cursor=cursor,
        islands=config.islands,
        multiple_of=config.mesh.tp,
    )
    return Prefetched(batches, depth=ahead, pin=torch.cuda.is_available()) if ahead else batches


def evaluate(config: RunConfig, engine: PipelineEngine, corpus: RunData) -> float | dict[str, float] | None:
    """Mean held-out loss in nats per token, the same on every rank; None if nothing is held out.

    For a mixture, it is the loss of each source by name; together they read ``dsx.train.eval_tokens``.
    """
    losses, text = {}, as_text(corpus, config.dsx.data)
    for part in text.held_out:
        batches = _evaluation_batches(config, text, part, dp_rank=engine.groups.share)
        total, mute = len(batches), engine.groups.mute
        with Waiting("evaluating", total=total, unit="micro-batches", quiet=mute) as waiting:
            losses[part.name] = float(engine.eval_batch(waiting.counts(batches), num_micro_batches=total))
    if len(text.parts) == 1:
        return next(iter(losses.values()), None)
    return losses or None


def resume(config: RunConfig, engine: PipelineEngine, corpus: RunData) -> dict[str, Any]:
    """Continue from the newest checkpoint below the config's output folder, or from what ``resume`` names.

    Returns:
        The ``client_state`` of that checkpoint; empty for a fresh start.

    Raises:
        CheckpointError: The checkpoint is of another model, or of other training text.
    """
    text = as_text(corpus, config.dsx.data)
    if isinstance(text, OwnText):
        require_same_everywhere(text)
    start = agree(lambda: start_of(config))
    state = {} if start is None else _load(config, engine, text, *start)
    if engine.outer is not None:
        engine.outer.join()
        # Of samples that the others know of, an island that lost its own checkpoint has seen as many.
        state["data_cursor"] = max(state.get("data_cursor", 0), int(engine.global_samples))
    return state


def _load(
    config: RunConfig, engine: PipelineEngine, text: Text | OwnText, root: Path, tag: str | None
) -> dict[str, Any]:
    """Load a checkpoint that :func:`resume` has found, and see whether it is of this run's text."""
    from dsx.checkpoint.run.state import optimizer_settings

    wanted = optimizer_settings(engine)
    with Waiting(f"reading the checkpoint in {root}", quiet=engine.groups.mute):
        path, state = engine.load_checkpoint(root, tag)
    samples = int(engine.global_samples)
    agree(lambda: _require_same_text(path, state, text, samples, config.sequence_length))
    if isinstance(text, Text):
        text.resume(state)
    if not engine.groups.mute:
        kept = optimizer_settings(engine)
        for key in (key for key in wanted if key in kept and kept[key] != wanted[key]):
            what = f"{at(f'optimizer.params.{key}', wanted[key])} is not taken"
            said = f"{what}: the optimizer goes on with the checkpoint's {kept[key]}"
            complain(f"warning: {printable(said)}")
    return state


def save(
    config: RunConfig, engine: PipelineEngine, corpus: RunData, monitor: Monitor, guard: Guard | None = None
) -> None:
    """Save a checkpoint with what :func:`resume` needs, and the resolved config beside it."""
    root = config.output / store.CHECKPOINTS
    samples, text = int(engine.global_samples), as_text(corpus, config.dsx.data)
    client_state = {
        "data_cursor": samples,
        "data_digest": text.digest,
        "data_stream": _stream_state(text, samples if guard is None else guard.data_cursor),
        "tokens": samples * config.sequence_length,
        "tokenizer": config.dsx.data.tokenizer,
        **({} if guard is None else guard.state),
        **agree(lambda: monitor.state),
    }
    train, begun = config.dsx.train, time.perf_counter()
    with Waiting(f"saving step {engine.global_steps}", quiet=engine.groups.mute):
        path = engine.save_checkpoint(
            root, client_state=client_state, background=train.save_in_background, keep=train.keep_checkpoints
        )
    if engine.groups.rank == 0:
        content = json.dumps(config.recorded(), indent=2) + "\n"
        store.write_atomically(config.output / CONFIG, content.encode())
    monitor.saved(path, seconds=time.perf_counter() - begun, background=train.save_in_background)
    monitor.wrote("checkpoints", root)
    monitor.wrote("resolved config", config.output / CONFIG)


def export(config: RunConfig, engine: PipelineEngine, monitor: Monitor) -> None:
    """Write the weights as a Hugging Face model folder, with the tokenizer, below the output folder.

    A folder that an earlier run left there for the same step is replaced.
    """
    from dsx.checkpoint.run.export import export_hf

    folder = config.output / "hf" / f"step{engine.global_steps}"
    agree(lambda: shutil.rmtree(folder, ignore_errors=True))
    with Waiting(f"writing {folder}", quiet=engine.groups.mute):
        export_hf(engine, folder)
    monitor.exported(folder)


def _saved_profile(config: RunConfig, own: Path) -> tuple[Path, Profile] | None:
    """The profile by which the checkpoint to be continued was laid out, or the one that the config names."""
    from dsx.planner import measured

    wanted = measured.conditions_of(config, device=device_name(), version=dsx.__version__)
    source = config.dsx.profile_source
    named = None if source in (None, MEASURE) else Path(str(source))
    if (
        own_checkpoint(config) is not None
        and own.exists()
        and (named is None or named.resolve() == own.resolve())
    ):
        profile = measured.read_saved(own)
        try:
            # Another device or version would choose another layout, which the checkpoint does not have.
            profile.require(wanted, name=str(own), ignore=measured.NOT_SHAPES)
        except ConfigError as error:
            raise ConfigError(
                error.where,
                f"{error.what}, and the checkpoint that this run continues is laid out by it",
                "set that back, or start anew in another dsx.train.output",
            ) from None
        return own, profile
    if named is None:
        return None
    profile = measured.read_saved(named, "dsx.profile")
    profile.require(wanted, name=str(named))
    return named, profile


def _open(config: RunConfig, folders: Sequence[Path]) -> Text:
    return Text.open(folders, config.dsx.data, vocab_size=config.model.vocab_size)


def _stream_state(corpus: Text | OwnText, cursor: int) -> dict[str, Any]:
    """Where every lane of a streamed text stands, gathered from the ranks that read them. Collective."""
    if not isinstance(corpus, Text) or not corpus.is_streamed:
        return {}
    states: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, corpus.state(cursor))
    return corpus.together(states)


def _require_same_text(
    path: Path, state: Mapping[str, Any], corpus: Text | OwnText, samples: int, sequence_length: int
) -> None:
    """Raise CheckpointError unless the place of ``samples`` in the data is the one that is meant."""
    if state.get("data_digest", corpus.digest) != corpus.digest:
        raise CheckpointError(
            str(path),
            f"it was trained on other text than {corpus.name}, or on the same in another mixture or order: "
            "the data position would mean nothing",
            "restore the text (dsx.data), or start anew in another dsx.train.output",
        )
    # The cursor is no measure of it: after a roll-back it is ahead of what was trained on.
    tokens = int(state.get("tokens", 0))
    if samples and tokens not in (0, samples * sequence_length):
        raise CheckpointError(
            str(path),
            f"it was trained on sequences of {tokens // samples} tokens, and "
            f"{at('dsx.data.sequence_length', sequence_length)} here: the data position would mean nothing",
            "set it back, or start from the weights alone: export them to Hugging Face, and give the folder "
            "as dsx.model.path with another dsx.train.output",
        )


def _evaluation_batches(
    config: RunConfig, corpus: Text | OwnText, part: TextPart | OwnPart, *, dp_rank: int
) -> EvaluationBatches:
    share = part.share / sum(other.share for other in corpus.held_out)
    return EvaluationBatches(
        part.sequences,
        micro_batch_size=config.micro_batch_size,
        dp=config.mesh.num_shares,
        dp_rank=dp_rank,
        max_tokens=round(config.dsx.train.eval_tokens * share),
        multiple_of=config.mesh.tp,
    )
