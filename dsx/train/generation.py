"""A model of ``transformers`` from a checkpoint of any layout and format, and text from it.

One process, no DeepSpeed. The checkpoint's tensors are read, by the byte ranges that its catalog lists,
straight into the model's own: nothing is converted on the disk, and no tensor is held twice. An adapter is
merged, in memory, into the weights that it adapts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from dsx.checkpoint.base import completed, of_today
from dsx.checkpoint.catalog import Catalog, Entry, is_quantized
from dsx.checkpoint.claims import check_num_layers, model_of, model_of_fact
from dsx.checkpoint.formats.huggingface import catalog
from dsx.checkpoint.formats.huggingface import names as hf_names
from dsx.checkpoint.formats.huggingface.weights import HfWeights, split
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.pieces import whole_part
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.read import Reader
from dsx.checkpoint.reshard import under_hf_names
from dsx.config.adapter import SETTINGS, WEIGHTS, adapter_of
from dsx.config.schema import NO_TOKENIZER, AdapterConfig, DataConfig
from dsx.config.wording import at
from dsx.data.masks import Masks
from dsx.data.records import Example
from dsx.data.tokenizers import Tokenizer, load_tokenizer
from dsx.errors import CheckpointError, ConfigError, DataError, DsxError
from dsx.models.adapters import PREFIX, homes, is_factor, peft_specs
from dsx.models.custom_code import check_model_code
from dsx.models.param import TOWER, ParamSpec
from dsx.models.params import param_specs
from dsx.models.spec import Model
from dsx.models.transformers_settings import first_line, quiet_transformers, with_cap
from dsx.nn.adapter import left, merged
from dsx.nn.parameters import DTYPES
from dsx.train.run_folder import find_checkpoint, tokenizer_of_run
from dsx.waiting import Waiting

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_REPLY = "reply"
_MOST_TOKENS = 1 << 24
_MOST_BEAMS = 64
_OTHER_CONFIG = "use the config.json that was saved with these weights"


def load_transformers(
    checkpoint: str | Path,
    *,
    step: int | None = None,
    config: str | Path | None = None,
    tokenizer: str | None = None,
    precision: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Tokenizer]:
    """The ``transformers`` model that a checkpoint holds, ready to generate, and the tokenizer of its text.

    Args:
        checkpoint: A run's output folder, or a checkpoint: dsx's in any layout, stock or universal DeepSpeed,
            torch DCP, a Hugging Face model folder, or an adapter's of PEFT.
        step: Optimizer step, where the folder has checkpoints of several; the latest by default.
        config: Hugging Face model folder or ``config.json`` of the model, for checkpoints that do not say
            what they are of, as stock DeepSpeed's; of an adapter's folder the model that it was trained on,
            if that has moved.
        tokenizer: "bytes", or a ``transformers`` tokenizer by folder or name; by default the one that the
            model was trained with, where that is known.
        precision: fp32, bf16 or fp16; by default what the weights were trained in.
        device: As torch names it.
        trust_remote_code: Run Python code that comes with the model's folder or the tokenizer. Without it
            what needs such code is refused; nobody is asked.

    Raises:
        CheckpointError: Nothing that can be read there, tensors that are not the config's model's, or a model
            that needs code which is not trusted.
        ConfigError: A precision or device that there is not.
        DataError: The tokenizer is not known or cannot be loaded, or has more tokens than the model.
    """
    where = _device(device)
    if precision is not None and precision not in DTYPES:
        raise ConfigError(f"precision = {precision}", "there is no such precision", "use fp32, bf16 or fp16")
    folder = find_checkpoint(Path(checkpoint).expanduser(), step)
    adapter = folder if (folder / SETTINGS).is_file() else None
    if adapter is not None:
        told = config or hf_names.read_config(adapter / SETTINGS).get("base_model_name_or_path")
        base = Path(str(told)).expanduser()
        if told is None or not base.is_dir():
            what = f"the model that it was trained on is not known ({told})"
            raise CheckpointError(str(adapter), what, "give that model's folder (--model)")
        folder, config = base, None
    source = _of_text(completed(of_today(open_checkpoint(folder))))
    # Before the weights: the cheap things that can be wrong come first.
    hf_config = _config(source, config)
    file = str(config or source.root / hf_names.CONFIG)
    check_num_layers(source, hf_config, file, _OTHER_CONFIG)
    if not trust_remote_code:
        check_model_code(hf_config, file)
    name = tokenizer or _tokenizer(source, adapter)
    words = load_tokenizer(name, trust_remote_code=trust_remote_code)
    size = hf_config.get("vocab_size")
    if isinstance(size, int) and words.vocab_size > size:
        raise DataError(
            f"tokenizer {words.name}",
            f"it has {words.vocab_size} tokens, and the model in {source.root} has {size}",
            "give the tokenizer that the model was trained with",
        )
    with Waiting(f"reading the weights in {source.root}"):
        if source.format == catalog.FORMAT and config is None and not is_quantized(source):
            dtype = None if precision is None else DTYPES[precision]
            model = _pretrained(source, dtype, trust_remote_code=trust_remote_code)
        else:
            code = None if config is None or not trust_remote_code else Path(config).expanduser()
            model = _filled(source, hf_config, precision, code)
        if adapter is not None:
            _adapt(model, adapter, hf_config)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = words.end_id
    return model.to(where).eval(), words


def _of_text(source: Catalog) -> Catalog:
    """A checkpoint without what is trained of a tower of pictures."""
    told = source.facts.get("model") or {}
    if "pictures" not in told:
        return source
    entries = tuple(each for each in source.entries if not each.name.startswith(TOWER))
    specs = tuple(each for each in source.specs if not each.name.startswith(TOWER))
    facts = {**source.facts, "model": {key: told[key] for key in told if key != "pictures"}}
    return replace(source, entries=entries, specs=specs, facts=facts)


def generate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    show: Callable[[str], object] | None = None,
    chat: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Text that the model continues a prompt with, up to the end of a document.

    Args:
        model: As :func:`load_transformers` gives it.
        tokenizer: The model's.
        prompt: Text to continue; empty for the beginning of a document.
        tokens: At most so many.
        temperature: Of the distribution that tokens are drawn from; 0 takes the likeliest, always.
        top_k: Draw from the likeliest so many alone; 0 from all.
        top_p: Draw from the likeliest whose probabilities add up to this.
        seed: Of the draws. Sets torch's generators.
        show: Called with each piece of text as it comes; what prints it on a terminal passes it through
            :func:`dsx.printable`.
        chat: Take the prompt for a user's message: the tokenizer's chat template writes it, and the text is
            the assistant's turn.
        chat_template: A Jinja file, or the template itself, in place of the tokenizer's own.
        chat_template_kwargs: What the template is told besides the message.

    Raises:
        ConfigError: A number outside its range, or more tokens than the model has positions.
        DataError: There is no chat template, or it refuses the message.
    """
    _check(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    # What a generation_config.json may ask for and no memory holds.
    for name in ("num_beams", "num_return_sequences", "num_beam_groups"):
        value = getattr(model.generation_config, name, None)
        if value is not None and not (isinstance(value, int) and 1 <= value <= _MOST_BEAMS):
            raise ConfigError(
                at(f"{name} in the generation settings of {model.name_or_path or 'the model'}", value),
                f"each is a copy of the whole text; dsx makes 1 to {_MOST_BEAMS}",
                "correct its generation_config.json",
            )
    ends = [tokenizer.end_id]
    if chat:
        prompt, end = _turn(tokenizer, prompt, chat_template, chat_template_kwargs or {})
        ends += end
    ids = [int(one) for one in tokenizer.encode([prompt])[0]] or [tokenizer.end_id]
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and len(ids) + tokens > positions:
        raise ConfigError(
            f"tokens = {tokens}",
            f"the prompt has {len(ids)}, and the model was made for {positions} in all",
            f"use at most {max(0, positions - len(ids))}, or a shorter prompt",
        )
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    torch.manual_seed(seed)
    inputs = torch.tensor([ids], device=model.device)
    try:
        with quiet_transformers():
            made: Any = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=tokens,
                streamer=None if show is None else _streamer(tokenizer, show),
                eos_token_id=ends,
                **sampling,
            )
    except (DsxError, OSError):  # of show
        raise
    except Exception as error:  # settings of a wrong type, code on the hub, a way that cannot be streamed
        raise ConfigError(
            f"the generation settings of {model.name_or_path or 'the model'}",
            f"transformers does not generate with them ({first_line(error)})",
            "correct its generation_config.json, or call model.generate as you want it",
        ) from error
    return tokenizer.decode(made[0, len(ids) :].tolist())


def _turn(
    tokenizer: Tokenizer, message: str, template: str | None, told: Mapping[str, Any]
) -> tuple[str, list[int]]:
    """A user's message as its template writes it, up to where the assistant begins, and what ends that turn.

    That is the special token behind a reply; a template that has none leaves it to the end of a document.
    """
    masks = Masks(DataConfig(sequence_length=1, format="chat", chat_template=template), tokenizer)
    turns = ({"role": "user", "content": message}, {"role": "assistant", "content": _REPLY})
    chat = Example(where="the prompt", messages=turns, kwargs=told)
    prompt, _ = masks.render(chat, 1, prompt=True)
    behind = masks.render(chat, len(turns))[0].rpartition(_REPLY)[2]
    ids = [int(one) for one in tokenizer.encode([behind])[0][:1]] if behind else []
    return prompt, [] if tokenizer.decode(ids) else ids


@torch.no_grad()
def _adapt(model: PreTrainedModel, folder: Path, hf_config: Mapping[str, Any]) -> None:
    """Put what an adapter's folder holds into the model that it was trained on."""
    known = model_of(hf_config)
    block = AdapterConfig(path=str(folder))
    made = replace(known, adapter=adapter_of(block, known, trained=False))
    specs = param_specs(made, pad_multiple=1)
    with HfWeights(folder, file=WEIGHTS) as files:
        held: dict[str, torch.Tensor] = {}
        files.check(peft_specs(specs))
        for spec in peft_specs(specs):
            held |= split(spec, files.read(spec))
    own = {name: tensor for name, tensor in held.items() if not is_factor(name)}
    for name, tensor in own.items():
        model.get_parameter(name.removeprefix(PREFIX)).copy_(tensor)
    _merge(model, made, specs, held)


def _merge(
    model: PreTrainedModel, known: Model, specs: Sequence[ParamSpec], held: Mapping[str, torch.Tensor]
) -> None:
    """Put adapters into the matrices that they adapt, in float32."""
    assert known.adapter is not None
    wide = {name: tensor.float() for name, tensor in held.items()}
    for name, start, crossed in homes(specs):
        weight = model.get_parameter(name)
        base = left(known.adapter, weight.t() if crossed else weight)
        whole = merged(known.adapter, base.float(), wide, start)
        weight.copy_(whole.t() if crossed else whole)


def _streamer(tokenizer: Tokenizer, show: Callable[[str], object]) -> Any:
    """Transformers' own, which waits for whole words, with another end than standard output."""
    from transformers import TextStreamer

    class Shown(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            show(text)

    return Shown(tokenizer, skip_prompt=True)


def _pretrained(source: Catalog, dtype: torch.dtype | None, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a Hugging Face folder, as transformers loads it; pickles stay unread.

    A config.json is small whatever it claims, and transformers fills what the files lack with random numbers:
    both are a CheckpointError here, as is a tensor that the model has no place for.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    described = None
    try:
        with quiet_transformers():
            if not trust_remote_code:
                described = with_cap(
                    AutoConfig.from_pretrained(source.root, trust_remote_code=False, local_files_only=True)
                )
                _check_claims(source, described, str(source.root / hf_names.CONFIG))
            model, told = AutoModelForCausalLM.from_pretrained(
                source.root,
                config=described,
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except CheckpointError:
        raise
    except Exception as error:  # a damaged folder makes transformers raise anything
        raise CheckpointError(
            str(source.root),
            f"transformers cannot load it ({first_line(error)})",
            "export or download it again",
        ) from error
    if told["missing_keys"]:  # transformers fills them with random numbers
        raise CheckpointError(
            f"{source.root}: tensor {min(told['missing_keys'])}",
            "the model of its config has it, and the files do not",
            _OTHER_CONFIG,
        )
    # What the model's class itself ignores (rotary frequencies) is not among them.
    left = sorted(name for name in told["unexpected_keys"] if not hf_names.is_buffer(name))
    if left:
        raise CheckpointError(
            f"{source.root}: tensor {left[0]}",
            f"the model of its config has no place for it (of {len(left)} such tensors)",
            _OTHER_CONFIG,
        )
    return cast("PreTrainedModel", model)


def _check_claims(source: Catalog, described: PretrainedConfig, file: str) -> None:
    """Refuse a config that claims a larger model than a checkpoint holds, before the model is made."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    claimed = sum(parameter.numel() for parameter in model.parameters())
    held = sum(entry.numel for entry in source.entries if entry.state in ("weight", "master"))
    if claimed > held:
        raise CheckpointError(
            f"{file}: a model of {claimed:,} parameters",
            f"{source.root} holds {held:,} elements",
            _OTHER_CONFIG,
        )


def _filled(
    source: Catalog, hf_config: Mapping[str, Any], precision: str | None, code: Path | None
) -> PreTrainedModel:
    """A model of ``hf_config`` with the checkpoint's weights, read into its parameters one by one.

    ``code`` is the config's file or folder if the code beside it is trusted.
    """
    named = under_hf_names(source, hf_config)
    factors = [entry for entry in named.entries if is_factor(entry.name)]
    own = replace(named, entries=tuple(entry for entry in named.entries if not is_factor(entry.name)))
    dtype = DTYPES.get(precision or str(source.facts.get("precision")), _stored_dtype(own))
    where = str(source.root)
    with Reader(named) as reader:
        if code is None:  # whatever the config claims, before it has memory
            with torch.device("meta"):
                _matched(reader, own, _empty(hf_config, dtype, where, code), source)
        model = _empty(hf_config, dtype, where, code)
        with torch.no_grad():
            for tensor, entry in _matched(reader, own, model, source):
                kind = str(tensor.dtype).removeprefix("torch.")
                reader.fill(entry, [whole_part(entry.shape)], as_numpy(tensor), kind)
            if factors:
                held = {entry.name: torch.empty(entry.shape) for entry in factors}
                for entry in factors:
                    out = as_numpy(held[entry.name])
                    reader.fill(entry, [whole_part(entry.shape)], out, "float32")
                known = model_of_fact(source.facts["model"])
                _merge(model, known, param_specs(known), held)
    return model


def _matched(
    reader: Reader, named: Catalog, model: PreTrainedModel, source: Catalog
) -> list[tuple[torch.Tensor, Entry]]:
    """The model's tensors, each with what the checkpoint has of it. Raises CheckpointError."""
    homes: dict[int, list[str]] = defaultdict(list)
    held = model.state_dict(keep_vars=True)
    for name, tensor in held.items():
        homes[id(tensor)].append(name)  # all names of a tied one
    known = {alias: entry.name for entry in named.entries for alias in (entry.name, *entry.aliases)}
    used: set[str] = set()
    matched: list[tuple[torch.Tensor, Entry]] = []
    for names in homes.values():
        used.update(names)
        tensor = held[names[0]]
        found = (reader.find(known.get(name, name), "weight") for name in names)
        entry = next((one for one in found if one is not None), None)
        if entry is None:
            if not isinstance(tensor, torch.nn.Parameter):
                continue
            raise _misfit(source, names[0], "the checkpoint does not have it")
        used.update((entry.name, *entry.aliases))
        shape = tuple(tensor.shape)
        if entry.shape != shape:
            what = f"its shape is {entry.shape}, and the model of the config needs {shape}"
            raise _misfit(source, entry.name, what)
        matched.append((tensor, entry))
    # Other buffers (masks, rotary frequencies) are as the model made them: functions of its config.
    left = [entry.name for entry in named.entries if entry.name not in used and entry.role != "buffer"]
    if left:
        raise _misfit(source, left[0], "the model of the config has no place for it")
    return matched


def _empty(
    hf_config: Mapping[str, Any], dtype: torch.dtype, where: str, code: Path | None
) -> PreTrainedModel:
    """A model whose parameters have memory and no values yet."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from dsx.hub.headed import language_model
    from dsx.hub.model_structure import hf_config_of
    from dsx.hub.values import float32_names

    try:
        # The attention that from_pretrained chooses; from_config has the same default.
        if code is not None and "auto_map" in hf_config:
            folder = code if code.is_dir() else code.parent
            described = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        else:
            described = hf_config_of(hf_config)
        with quiet_transformers(), no_init_weights():
            model: PreTrainedModel = (
                language_model(described, dtype=dtype)
                if code is None
                else AutoModelForCausalLM.from_config(described, dtype=dtype, trust_remote_code=True)
            )
        for name in float32_names(model, dtype):
            model.get_parameter(name).data = model.get_parameter(name).data.float()
    except Exception as error:  # a config that is none makes transformers raise anything
        raise CheckpointError(
            f"{where}: model_type = {hf_config.get('model_type')}",
            f"transformers cannot make a language model of its config ({first_line(error)})",
            "give the config.json of a causal language model",
        ) from error
    model.tie_weights()  # a part of what no_init_weights leaves out
    return model


def _config(source: Catalog, config: str | Path | None) -> Mapping[str, Any]:
    if config is not None:
        path = Path(config).expanduser()
        return hf_names.read_config(path)
    known = source.facts.get("hf_config")
    if isinstance(known, Mapping):
        return known
    raise CheckpointError(
        str(source.root),
        "it does not say what model it is of: it has no Hugging Face config",
        "give the model's config.json, or a folder that has it (--model)",
    )


def _tokenizer(source: Catalog, adapter: Path | None) -> str:
    if adapter is not None and any((adapter / name).is_file() for name in _VOCABULARIES):
        return str(adapter)
    client = source.facts.get("client_state")
    told = client.get("tokenizer") if isinstance(client, Mapping) else None
    if told not in (None, NO_TOKENIZER):
        return str(told)
    if any((source.root / name).is_file() for name in _VOCABULARIES):
        return str(source.root)
    found = tokenizer_of_run(source.root)
    if found is None or found == NO_TOKENIZER:
        raise DataError(
            f"the tokenizer of {source.root}",
            "neither the checkpoint nor a config.json of dsx above it names one",
            'give it (--tokenizer): "bytes", a folder with tokenizer.json, or a name on the hub',
        )
    return found


def _stored_dtype(source: Catalog) -> torch.dtype:
    """That of most weights."""
    sizes: dict[str, int] = defaultdict(int)
    for entry in source.entries:
        if entry.state in ("weight", "master") and entry.role != "buffer":
            sizes[entry.dtype] += entry.numel
    if not sizes:
        raise CheckpointError(str(source.root), "it has no weights", "name a checkpoint with weights")
    dtype: torch.dtype = getattr(torch, max(sizes, key=lambda name: sizes[name]))
    return dtype


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:  # CPU builds say so with an assertion
        raise ConfigError(
            f"device = {name}",
            f"torch cannot use it ({first_line(error)})",
            'use "cpu", or a device that this torch has',
        ) from None


def _check(*, tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    for name, value, fine, fix in (
        ("tokens", tokens, 1 <= tokens <= _MOST_TOKENS, f"use 1 to {_MOST_TOKENS}"),
        (
            "temperature",
            temperature,
            0 <= temperature < float("inf"),
            "use 0 for the likeliest, or 0.8",
        ),
        ("top_k", top_k, top_k >= 0, "use 0 for all tokens, or how many to draw from"),
        ("top_p", top_p, 0 < top_p <= 1, "use 1 for all tokens, or a probability such as 0.95"),
    ):
        if not fine:
            raise ConfigError(f"{name} = {value}", "it is out of range", fix)


def _misfit(source: Catalog, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source.root}: tensor {name}", what, "give the config.json of the model that it is of (--model)"
    )
