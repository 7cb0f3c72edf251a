"""Schema of the ``dsx`` block: strict, frozen, every key described (``dsx schema`` prints it for editors).

Batch sizes, optimizer, precision, clipping and ZeRO live in DeepSpeed's own keys and nowhere here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dsx.config.schema_block import MistakeError, Positive, SchemaBlock, Seed
from dsx.config.schema_parallel import MoeConfig, ParallelConfig
from dsx.models.param import Quantization
from dsx.models.spec import PresetFamily, Recompute
from dsx.parallel.islands import wrong_meeting
from dsx.schedules.builders import ScheduleName

MEASURE = "measure"
"""``dsx.profile`` of a run that measures its layers when it starts."""

Policy = Literal["off", "stop", "skip", "roll_back"]
StopSignal = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"]


class FaultsConfig(SchemaBlock):
    """What ends, pauses or mends a run.

    Of the policies, stop ends the run with an error, without saving the bad step; skip does not apply the
    step and continues with the next data; roll_back loads the newest checkpoint of the run and continues with
    the data after the bad batch.
    """

    hang_seconds: float = Field(
        default=1200.0,
        ge=0,
        description="End the run with a report when a rank has not moved for so long: no action of the "
        "schedule, no save, no load. 0: wait for ever. Peers that fail or die end it within seconds anyway.",
    )
    silent_seconds: int = Field(
        default=4,
        ge=0,
        description="End the run when a machine has answered nothing for so long. Its kernel answers, so a "
        "rank that computes, compiles or is stopped is not silent. Raise it for a network that pauses for "
        "longer. 0: only the broken connections of training itself are noticed, perhaps after minutes.",
    )
    stop_signals: tuple[StopSignal, ...] = Field(
        default=("SIGTERM",),
        strict=False,  # JSON has lists
        description="Signals, to any one rank, at which the run saves after the current step and ends with "
        "128 + the signal's number. With none, signals kill.",
    )
    grace_seconds: float = Field(
        default=28.0,
        gt=0,
        description="The run ends so long after such a signal, saved or not. Launchers, Slurm and Kubernetes "
        "kill after 30 seconds unless they are told otherwise.",
    )
    nonfinite: Policy = Field(default="stop", description="What happens if loss or norm is not finite.")
    loss_spike: Policy = Field(
        default="off", description="The same if the loss is spike_sigmas above spike_window's median."
    )
    grad_norm_spike: Policy = Field(default="off", description="The same for the gradient norm.")
    spike_window: int = Field(
        default=128, ge=8, description="Latest steps by which spikes are judged, once half of them are there."
    )
    spike_sigmas: float = Field(
        default=8.0,
        gt=0,
        description="Height of a spike in standard deviations: the median absolute deviation x 1.4826.",
    )
    most_skips: int = Field(default=10, ge=1, description="End the run if more steps in a row are skipped.")
    most_roll_backs: int = Field(default=3, ge=0, description="End the run at one more, restarts included.")
    check_replicas_every: int = Field(
        default=0,
        ge=0,
        description="Steps between comparisons of weights that ranks hold alike, bit by bit. 0: never.",
    )
    replicas_differ: Literal["stop", "roll_back"] = Field(
        default="stop", description="What happens if check_replicas_every finds a difference."
    )

    @property
    def rolls_back(self) -> str | None:
        """The first policy that is in use and takes the run back to a checkpoint."""
        keys = ("nonfinite", "loss_spike", "grad_norm_spike", "replicas_differ")
        looked_for = keys if self.check_replicas_every else keys[:-1]
        return next((key for key in looked_for if getattr(self, key) == "roll_back"), None)


OWN = "own"
"""``dsx.data.source`` of a program that brings its own samples (dsx.OwnCorpus)."""

NO_TOKENIZER = "none"
"""``dsx.data.tokenizer`` of samples that are token ids already."""


COLUMNS: dict[str, tuple[str, ...]] = {
    "text": (),
    "completion": ("prompt", "completion", "tools", "chat_template_kwargs"),
    "chat": ("messages", "system", "tools", "chat_template_kwargs"),
}
"""What ``dsx.data.columns`` can name for each format."""


class TextSource(SchemaBlock):
    """Where text comes from."""

    source: str = Field(
        default="python-stdlib",
        min_length=1,
        description='"python-stdlib" (the source of Python\'s standard library, no network), a local file, '
        "folder or glob (text, jsonl, json, parquet, csv), or the name of a Hugging Face hub data set. "
        '"own": the program that reads the config has samples of its own (dsx.OwnCorpus).',
    )
    name: str | None = Field(default=None, description="Configuration of the hub data set.")
    split: str = Field(default="train", min_length=1, description="Split of the hub data set.")
    format: Literal["text", "completion", "chat"] = Field(
        default="text",
        description="What a record is: text; completion, a prompt and a completion, each a string or a list "
        "of messages; chat, a list of messages (role and content, as OpenAI's, or from and value, as "
        "ShareGPT's) with tools, if it has them. What is trained of the last two, train_on says.",
    )
    text_column: str = Field(default="text", min_length=1, description="Column that holds the text.")
    columns: dict[
        Literal["messages", "system", "tools", "prompt", "completion", "chat_template_kwargs"], str
    ] = Field(
        default={},
        description='Chat and completion: columns of other names than the usual: {"messages": "dialogue"}.',
    )
    max_bytes: Positive | None = Field(
        default=None, description="Read about this many bytes of text at most."
    )


class MixedSource(TextSource):
    """One source of a mixture."""

    weight: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        description="Share of the sequences, relative to the other sources' weights; leave one of none out.",
    )
    label: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+$",
        description="The name in metrics and messages; null: the last part of source.",
    )

    @property
    def called(self) -> str:
        """The label, or one made of the source."""
        if self.label is not None:
            return self.label
        parts = (part.partition(".")[0] or part for part in reversed(self.source.split("/")))
        named = (re.sub(r"[^\w.-]+", "_", part).strip("_") for part in parts)
        return next(filter(None, named), "text")


class DataConfig(TextSource):
    """Training text."""

    sources: list[MixedSource] = Field(
        default_factory=list,
        description="A mixture instead of source: objects with source, weight, label, name, split, "
        "text_column and max_bytes. Shares are exact, and a source that ends begins again.",
    )
    tokenizer: str = Field(
        default="auto",
        min_length=1,
        description='"bytes" (256 bytes, end of document), or a transformers tokenizer: name or path. '
        '"auto" is the one in the folder dsx.model.path, or bytes if the weights are fresh ("none" with '
        'source "own", whose samples are token ids).',
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the tokenizer (auto_map in its tokenizer_config.json). "
        "Without it such a tokenizer is refused; nobody is asked. A model's own code is never run.",
    )
    sequence_length: Positive = Field(description="Tokens per sequence.")
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="Chat: a Jinja file, or the template itself, in place of the tokenizer's own.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description='Chat: what the template is told besides the chat: {"enable_thinking": false}. A column '
        "of that name adds to it, or says otherwise, for its record.",
    )
    chat_date: date | None = Field(
        default=None,
        strict=False,
        description='Chat: the day that a template which writes the date is told, "2025-12-31"; null: the '
        "day on which the data are prepared. Streaming needs it for such a template.",
    )
    train_on: Literal["assistant", "each", "last", "all"] = Field(
        default="assistant",
        description="Chat: what is trained on: all turns of the assistant, as the whole chat has them; each, "
        "as it is when it is written, in a document of its own where the template later rewrites it; the "
        "last turn; or every token. Completion: the completion, or with all the prompt, too.",
    )
    documents: Literal["auto", "apart", "joined"] = Field(
        default="auto",
        description="apart: attention stays within a document, and positions begin at 0 in each; chats and "
        "completions are packed whole. joined: one stream, cut anywhere. auto is joined if all is text, else "
        "apart.",
    )
    pictures: bool = Field(
        default=False,
        description="Chat: turns may hold pictures, files on this machine, which the processor in the folder "
        "dsx.model.path prepares and the model's own tower reads, on the first stage: frozen but for what "
        "dsx.train.tower and dsx.adapter name. A chat is then one sequence, not packed with others.",
    )
    too_long: Literal["truncate", "drop", "refuse"] = Field(
        default="truncate",
        description="Chats and completions (apart) longer than a sequence: keep the first tokens (what "
        "then has nothing left to train on is dropped), drop them, or refuse the data.",
    )
    bad_records: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="Chats and completions that cannot be used: an error that names file and line, or skip "
        "and count them.",
    )
    held_out: float = Field(
        default=0.05, ge=0, lt=1, description="Fraction of the documents kept for evaluation."
    )
    seed: Seed = Field(default=0, description="Seed of the sample order and of the held-out choice.")
    streaming: bool = Field(
        default=False,
        description="Read and tokenise the text as the run goes instead of preparing it on disk first: for "
        "text larger than the disk. The order is then shuffled within shuffle_buffer.",
    )
    shuffle_buffer: Positive = Field(
        default=8192,
        description="Streaming: sequences held in memory for shuffling, over all data-parallel ranks "
        "together (two per lane at least); 1 keeps the order of each lane.",
    )
    lanes: Positive = Field(
        default=64,
        description="Streaming: parts of the text that are read side by side. They decide the order, so they "
        "stay for a run's life. If micro-batch x data-parallel degree divides them, a rank reads its own.",
    )
    prefetch: int = Field(
        default=8, ge=0, description="Micro-batches that a thread reads ahead; 0 reads when they are needed."
    )

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        fields = TextSource.model_fields
        given = [key for key in fields if getattr(self, key) != fields[key].default]
        if self.tokenizer == NO_TOKENIZER and self.source != OWN:
            what = 'tokenizer "none" is for samples that are ids (source "own"), not for text'
            raise MistakeError(what, 'name a tokenizer, or "auto"')
        if self.source == OWN and (self.streaming or len(given) > 1):
            other = next((key for key in given if key != "source"), "streaming")
            raise MistakeError(f'source "own" is not text, so that {other} has no meaning', "leave it out")
        if any(part.source == OWN for part in self.sources):
            raise MistakeError('"own" cannot be mixed with text', "mix in the program that has the samples")
        self._check_examples()
        if "sources" in self.model_fields_set and not self.sources and "source" not in self.model_fields_set:
            raise MistakeError("sources has none", 'name some, or a source ("python-stdlib")')
        if self.sources and given:
            raise ValueError(f"sources and {given[0]} are both given; each of sources has its own {given[0]}")
        if self.streaming and (self.max_bytes or any(part.max_bytes for part in self.sources)):
            what = "streaming and max_bytes are both given; a stream is read to its end"
            raise MistakeError(what, "leave one of them out")
        counts = Counter(part.called for part in self.sources)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise MistakeError(f'two of sources are called "{twice[0]}"', "give each a label of its own")
        return self

    def _check_examples(self) -> None:
        """Raise MistakeError for what has no meaning, or cannot be done, for the formats of the sources."""
        for part in self.parts():
            columns = COLUMNS[part.format]
            other = next((key for key in part.columns if key not in columns), None)
            if other is not None:
                raise MistakeError(
                    f'columns has "{other}", which format "{part.format}" does not read',
                    f"name {' or '.join(columns)}" if columns else "name the text's column with text_column",
                )
            if part.format != "text" and part.text_column != "text":
                raise MistakeError(f'format "{part.format}" reads no text_column', "use columns")
        if self.pictures:
            self._check_pictures()
        if all(part.format == "text" for part in self.parts()):
            template = ("chat_template", "chat_template_kwargs", "chat_date")
            keys = (*template, "train_on", "too_long", "bad_records")
            fields = type(self).model_fields
            unread = next((key for key in keys if getattr(self, key) != fields[key].default), None)
            if unread is not None:
                raise MistakeError(
                    f'{unread} has no meaning for format "text"', 'set format to "chat" or "completion"'
                )

    def _check_pictures(self) -> None:
        """Raise MistakeError for what cannot be done with pictures."""
        if any(part.format != "chat" for part in self.parts()):
            raise MistakeError("pictures stand in chats", 'set format to "chat", of every source')
        for key, value, fix in (
            ("streaming", True, "prepare the chats (streaming: false)"),
            ("train_on", "each", 'use "assistant" or "last"'),
            ("documents", "apart", 'leave documents at "auto": a chat is a sequence'),
            ("documents", "joined", 'leave documents at "auto": a chat is a sequence'),
            ("too_long", "truncate", 'set too_long to "drop" or "refuse": a picture cut in two is none'),
        ):
            if getattr(self, key) == value:
                raise MistakeError(f"pictures are not read with {key} {json.dumps(value)}", fix)

    @property
    def keeps_apart(self) -> bool:
        """Whether documents are kept apart: micro-batches then have positions beside the ids."""
        if self.documents == "auto":
            return not self.pictures and any(part.format != "text" for part in self.parts())
        return self.documents == "apart"

    @property
    def keeps_whole(self) -> bool:
        """Whether no document is cut in two for a sequence."""
        return self.keeps_apart or self.pictures

    def parts(self) -> tuple[MixedSource, ...]:
        """What is mixed: one part for a single text."""
        if self.sources:
            return tuple(self.sources)
        return (MixedSource(**{key: getattr(self, key) for key in TextSource.model_fields}),)

    def of_part(self, part: MixedSource) -> DataConfig:
        """These settings for ``part`` alone."""
        own = {key: getattr(part, key) for key in TextSource.model_fields}
        return self.model_copy(update={**own, "sources": []})


class ModelConfig(SchemaBlock):
    """The model to train: exactly one of preset, config and path."""

    family: PresetFamily | None = Field(
        default=None,
        description='Architecture of the preset; needed for presets that several families have ("tiny").',
    )
    implementation: Literal["auto", "dsx", "transformers"] = Field(
        default="auto",
        description="Whose modules the layers are made of: dsx's, for the families that it has, or those of "
        'transformers, for any causal language model. "auto" takes dsx\'s where it has the family.',
    )
    preset: str | None = Field(
        default=None, description="Name of a built-in model; `dsx presets` lists them."
    )
    config: dict[str, Any] | None = Field(default=None, description="A Hugging Face config.json, inline.")
    path: str | None = Field(
        default=None,
        min_length=1,
        description="A Hugging Face model folder: config.json and, perhaps, weights.",
    )
    weights: Literal["auto", "load", "random"] = Field(
        default="auto",
        description='"auto" loads safetensors if path holds any, "load" insists, "random" starts fresh.',
    )
    vocab_multiple: Positive = Field(
        default=64,
        description="Each tensor-parallel rank's vocabulary rows are padded to a multiple of this.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description='Hugging Face config keys to change, e.g. {"n_layer": 8}.'
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("preset", "config", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            said = "none of them is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"exactly one of preset, config and path is needed; {said}")
        return self


class ScheduleConfig(SchemaBlock):
    """Order of the micro-batches in the pipeline: by name, or from a file."""

    name: Literal["auto"] | ScheduleName = Field(
        default="auto",
        description='"auto": interleaved if chunks > 1, else 1f1b. gpipe, 1f1b and zb_h1 take 1 chunk, zbv, '
        "v_half, v_min and dualpipev 2, the others 2 or more; `dsx schedule NAME` draws one with its bubble "
        "and memory.",
    )
    file: str | None = Field(
        default=None,
        min_length=1,
        description="A CSV file instead of a name: one row per pipeline rank, actions as "
        "torch.distributed.pipelining writes them (2F0). It fixes pipeline, chunks and micro-batches.",
    )
    group_size: Positive | None = Field(
        default=None,
        description="Least micro-batches per group (interleaved, interleaved_zb); null: the pipeline degree. "
        "Larger ones hide slow links and keep more activations.",
    )
    warmup: int | None = Field(
        default=None,
        ge=0,
        description="Forwards that a rank starts ahead of the next one (interleaved: 2, interleaved_zb: 1).",
    )
    most_live: Positive | None = Field(
        default=None,
        description="Chunk activations alive at once on a rank (interleaved_zb, zb_h1); null: the fewest. "
        "More let weight gradients wait longer.",
    )
    activation_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Most memory that activations may take on a rank, in GiB; null: any. Choices from a "
        "profile stay within it.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        numbers = [key for key in ("group_size", "warmup", "most_live") if getattr(self, key) is not None]
        if self.file is not None and (self.name != "auto" or numbers):
            other = "name" if self.name != "auto" else numbers[0]
            raise ValueError(f"file and {other} are both given; a file is the whole schedule")
        return self


class ZeroConfig(SchemaBlock):
    """When ZeRO communicates under a pipeline; what it cuts is in DeepSpeed's zero_optimization."""

    reduce: Literal["step", "micro_batch"] | None = Field(
        default=None,
        description="ZeRO-2: reduce gradients once per step, each chunk's in its last backward, keeping "
        "them whole until then; or after every backward, keeping this rank's part alone, for as many times "
        "the traffic as there are micro-batches. null: once per step, but after every backward where the "
        "optimizer is offloaded and there are several.",
    )
    keep_gathered_bytes: int = Field(
        default=0,
        ge=0,
        description="ZeRO-3: memory per rank, in bytes, for parameters that stay gathered from one action of "
        "their chunk to the next. 0 leaves what stays to DeepSpeed's stage3_max_reuse_distance and "
        "stage3_max_live_parameters.",
    )


class LossConfig(SchemaBlock):
    """How the head and the loss are computed."""

    chunk_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="Head and cross entropy, forward and backward, so many tokens at a time, so that no "
        'micro-batch\'s logits exist; null or 0: all at once. "auto": as many as have logits of the size of '
        "the hidden states (at least 1024), where that saves more than 32 MiB and half of the logits.",
    )


class PartitionConfig(SchemaBlock):
    """How layers are spread over the pipeline stages."""

    method: (
        Literal["uniform", "parameters", "flops", "time"]
        | Annotated[str, Field(pattern=r"^type:.+$")]
        | Annotated[list[Positive], Field(min_length=1)]
    ) = Field(
        default="flops",
        description="What is balanced: layers, parameters, FLOPs, the layers whose class name matches "
        "type:<regex>, or an explicit number of layers per virtual stage. time: the cut with the shortest "
        "simulated step, from the layers' own times (dsx.profile).",
    )


class TrainConfig(SchemaBlock):
    """Length of the run and what it leaves behind."""

    steps: Positive = Field(description="Optimizer steps in all, those before a resume included.")
    output: str = Field(
        min_length=1,
        description="Folder for checkpoints, metrics and the resolved config; {layout} stands for the "
        "degrees, e.g. pp2-dp2-tp2.",
    )
    log_every: Positive | Literal["auto"] = Field(
        default="auto",
        description='Steps between progress lines. "auto" prints the first ten, then at most about 200 in '
        "all, while metrics.jsonl and W&B get every step. A number holds for all three.",
    )
    eval_every: int = Field(
        default=0, ge=0, description="Steps between held-out evaluations; 0: at the end only."
    )
    eval_tokens: Positive = Field(
        default=65_536, description="Held-out tokens per evaluation, rounded to whole batches."
    )
    save_every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: at the end only.")
    seed: Seed = Field(default=0, description="Seed of fresh weights and of dropout.")
    freeze: tuple[str, ...] = Field(
        default=(),
        strict=False,  # JSON has lists
        description="Parameters that are not trained: regular expressions, each searched for anywhere in the "
        'Hugging Face names, e.g. ["embed_tokens", "layers\\\\.[0-9]\\\\."].',
    )
    tower: tuple[str, ...] = Field(
        default=(),
        strict=False,  # as above
        description="Parameters of the tower of pictures that are trained; the rest of it is frozen: such "
        'expressions for names of the composite model, e.g. ["multi_modal_projector"], or ["."] for all.',
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description='"auto" continues from the latest checkpoint in output, if any; "never" does not. '
        "A folder, of another run or one of its checkpoints in any layout, is where a run begins whose own "
        "output has no checkpoint.",
    )
    save_in_background: bool = Field(
        default=False,
        description="Train on while a checkpoint is written, from a copy of the states in the host's memory.",
    )
    keep_checkpoints: int = Field(
        default=0, ge=0, description="Keep this many of the newest checkpoints; 0 keeps all."
    )
    export_hf: bool = Field(
        default=False, description="Write a Hugging Face model folder at the end; of an adapter, PEFT's."
    )
    trace_steps: list[Positive] = Field(
        default_factory=list,
        description="Steps, from 1, whose pipeline actions are recorded, compared with their simulation and "
        "drawn in output/trace.",
    )

    @field_validator("freeze", "tower")
    @classmethod
    def _are_expressions(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                what = f"{pattern!r} is no regular expression: {error}"
                raise MistakeError(what, "write \\\\ before what is meant as it stands") from None
        return patterns

    @model_validator(mode="after")
    def _steps_to_trace_exist(self) -> Self:
        late = [step for step in self.trace_steps if step > self.steps]
        if late:
            what = f"trace_steps names step {late[0]}, and steps = {self.steps} is the last"
            raise MistakeError(what, f"name steps up to {self.steps}")
        return self


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]  # JSON has lists


class AdapterConfig(SchemaBlock):
    """What is trained in place of the whole model, in the words of PEFT's LoraConfig."""

    type: Literal["lora", "dora"] = Field(
        default="lora", description="Low-rank products, or these with a trained magnitude for each output."
    )
    rank: Positive = Field(default=8, description="Rank of the products (PEFT: r).")
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=8.0, description="They are multiplied by alpha / rank (PEFT: lora_alpha)."
    )
    rslora: bool = Field(default=False, description="By alpha / the root of rank instead (PEFT: use_rslora).")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout of the products' inputs (PEFT: lora_dropout)."
    )
    targets: Annotated[str, Field(min_length=1)] | Names = Field(
        default="all-linear",
        description='Linears of blocks that get one: "all-linear", a list of names or ends of names, '
        'e.g. ["q_proj", "v_proj"], or a regular expression of whole names (PEFT: target_modules).',
    )
    target_parameters: Names = Field(
        default=(),
        description="Stacks of experts' matrices that get one: names or ends of names, "
        'e.g. ["mlp.experts.gate_up_proj"] (PEFT: the same).',
    )
    train_also: Names = Field(
        default=(),
        description="Ends of the names of modules that are trained themselves, "
        'e.g. ["embed_tokens", "lm_head"] (PEFT: modules_to_save).',
    )
    quantization: Quantization = Field(
        default="none",
        description="Form of frozen matrices of blocks' linears: their own, or bitsandbytes' 8 or 4 bits; "
        "nf4_double has the scales of nf4 in 8 bits.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of an adapter that PEFT or dsx has written, to go on with. It supplies the other "
        "keys.",
    )


class WandbConfig(SchemaBlock):
    """Weights & Biases."""

    mode: Literal["offline", "online", "disabled"] = Field(
        default="disabled",
        description="offline writes a run that `wandb sync` can send later; online sends it.",
    )
    project: str = Field(default="dsx", min_length=1, description="Project.")
    entity: str | None = Field(default=None, description="Account or team.")
    name: str | None = Field(default=None, description="Display name of the run.")
    group: str | None = Field(default=None, description="Group of runs.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")
    artifacts: Literal["reference", "off"] = Field(
        default="reference",
        description="reference: each checkpoint and exported model becomes a version of an artifact that "
        "says where it is; none of its bytes are sent. off: there are no artifacts.",
    )


class ElasticConfig(SchemaBlock):
    """What a run may become when it starts again on another number of ranks; its global batch stays."""

    tensor: Annotated[list[Positive], Field(min_length=1)] | None = Field(
        default=None,
        description="Tensor-parallel degrees that it may take, in order of preference: divisors of a node's "
        "GPUs. null: parallel.tensor.",
    )
    pipeline: Annotated[list[Positive], Field(min_length=1)] | None = Field(
        default=None,
        description="Pipeline degrees that it may take, in order of preference. null: parallel.pipeline.",
    )
    min_ranks: Positive = Field(
        default=1, description="Fewest ranks to train on; ranks that no layout can use wait as spares."
    )
    cluster: str | None = Field(
        default=None,
        min_length=1,
        description="Name or JSON file of a cluster (`dsx plan`): of the layouts with most ranks, take the "
        "one with the shortest predicted step that fits its memory. null: take the first legal one, by "
        "tensor, then by pipeline.",
    )


class OuterOptimizerConfig(SchemaBlock):
    """What moves the weights that islands share: torch's SGD, by default to the mean of the islands'.

    DiLoCo (arXiv:2311.08105) has lr 0.7 and momentum 0.9, for weights that one job has trained before.
    """

    lr: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Rate; 1 takes the mean as it is.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum, over rounds.")
    nesterov: bool = Field(default=True, description="Nesterov's momentum, if there is any.")


class OuterConfig(SchemaBlock):
    """Islands: copies of the job that now and then average how far they have moved, over slow links."""

    islands: Annotated[int, Field(ge=2)] = Field(
        description="How many there are. Batch keys and dsx.parallel are about one of them; together they "
        "read so many times the batch."
    )
    every: Positive = Field(default=50, description="Optimizer steps between rounds.")
    optimizer: OuterOptimizerConfig = Field(
        default=OuterOptimizerConfig(), description="What moves the common weights."
    )
    wire: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="How a movement travels. int8: one scale for 4096 elements, and what rounding keeps back "
        "is added the next time.",
    )
    shares: Positive = Field(
        default=1,
        description="Send the model in so many parts, each every so many steps, one after the other.",
    )
    delay: int = Field(
        default=0,
        ge=0,
        description="Steps that go on while a round is under way; 0 waits for it. Less than every / shares.",
    )
    meet: str = Field(
        default="",
        description="Where the first rank of the first island listens, host:port, the same everywhere. Each "
        "island is then started by a launcher of its own, and may come and go. Empty: one launcher starts "
        "all of them. Other ranks of the first island listen on free ports.",
    )
    island: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Which island this launch is, from 0; null without meet."
    )
    keys: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Folder with this island's keys (dsx islands keys): links are encrypted, and only "
        "islands with keys made together connect. Needed unless meet is on the same machine.",
    )
    insecure: bool = Field(
        default=False, description="Do without keys: whoever reaches meet can change weights."
    )
    patience_seconds: Annotated[float, Field(ge=1)] = Field(
        default=120.0,
        description="How long islands wait for one that is not ready, or from which nothing comes, before "
        "they go on without it. At half of it, it is asked to come with the steps that it has.",
    )

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.shares > self.every:
            what = f"shares = {self.shares} have a round each in every = {self.every} steps"
            raise MistakeError(what, f"use at most {self.every} shares")
        if self.delay and self.delay * self.shares >= self.every:
            what = f"delay = {self.delay} steps reach into the next round, every / shares steps later"
            most = -(-self.every // self.shares) - 1
            raise MistakeError(what, f"use at most {most}, or a larger every" if most else "use 0")
        return self

    @model_validator(mode="after")
    def _meet(self) -> Self:
        guarded = self.keys is not None
        wrong = wrong_meeting(self.meet, self.island, self.islands, keys=guarded, insecure=self.insecure)
        if wrong is not None:
            raise MistakeError(*wrong)
        return self


class TrackingConfig(SchemaBlock):
    """Where metrics go, besides the console and metrics.jsonl."""

    wandb: WandbConfig = Field(default=WandbConfig(), description="Weights & Biases.")


class DsxConfig(SchemaBlock):
    """The ``dsx`` block of a DeepSpeed JSON: 3D training with DeepSpeed."""

    model: ModelConfig = Field(description="Which model to train.")
    data: DataConfig = Field(description="Training text.")
    train: TrainConfig = Field(description="Length of the run and what it leaves behind.")
    adapter: AdapterConfig | None = Field(
        default=None, description="What is trained in place of the whole model; null: all of it."
    )
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="Degrees of parallelism.")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Pipeline schedule.")
    partition: PartitionConfig = Field(default=PartitionConfig(), description="Layers of each stage.")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="When ZeRO communicates.")
    loss: LossConfig = Field(default=LossConfig(), description="Head and loss.")
    moe: MoeConfig = Field(default=MoeConfig(), description="Routers of experts.")
    profile: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description='Times and bytes of the layers: "measure" measures them when the run starts and writes '
        "profile.json to its output; otherwise the path of such a file. What is auto or null in schedule, "
        "parallel.chunks and recompute is then chosen by simulated step; null keeps rules of thumb.",
    )
    profile_micro_batches: Positive = Field(
        default=5, description="Micro-batches to measure per kind of layer, after two that warm up."
    )
    recompute: Recompute | Literal["auto"] = Field(
        default="none",
        description="What backward computes again: none, selective (attention core), full (blocks), offload "
        '(blocks, whose inputs wait on the host). "auto" needs a profile.',
    )
    mlp_tiles: Positive | Literal["auto"] = Field(
        default=1,
        description="Parts of a rank's tokens that feed-forwards compute in turn, and again in backward.",
    )
    compile: Literal["none", "blocks"] = Field(
        default="none",
        description="blocks: torch.compile what blocks compute, once for all equal ones. What cannot be "
        "compiled runs as it is, and a warning names it.",
    )
    memory_check: Literal["warn", "refuse", "off"] = Field(
        default="warn",
        description="If the estimated peak is above a rank's memory: a warning, or no run; off: no look.",
    )
    proof: Literal["start", "off"] = Field(
        default="start", description="start: the layout is proved on a small model before it trains."
    )
    optimizer_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Bytes that the optimizer keeps per parameter besides weights and gradients, for the "
        "memory estimate of an optimizer that dsx does not know (it knows Adam, AdamW, Lion, SGD).",
    )
    outer: OuterConfig | None = Field(
        default=None,
        description="Islands: copies of the job that average their movements over slow links; null: one job.",
    )
    elastic: ElasticConfig | None = Field(
        default=None,
        description="What layout a run may take when it starts again on another number of ranks; null: the "
        "one that is written, or an error.",
    )
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="Where metrics go.")
    faults: FaultsConfig = Field(
        default=FaultsConfig(), description="What is watched for, and what happens then."
    )

    @property
    def profile_source(self) -> str | None:
        """:data:`MEASURE`, which a partition by time alone implies too, the path of a profile, or None."""
        return MEASURE if self.profile is None and self.partition.method == "time" else self.profile

    def is_measured(self, num_ranks: int) -> bool:
        """Whether a pipeline of ``num_ranks`` is to be chosen from measured costs.

        With one rank, only recompute and the memory cap leave anything to choose.
        """
        open_alone = self.recompute == "auto" or self.schedule.activation_gib is not None
        return self.profile_source is not None and (num_ranks > 1 or open_alone)
