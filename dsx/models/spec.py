"""The architecture's numbers, read from a Hugging Face config. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self, TypeAlias

from dsx.models.param import ParamSpec, Quantization

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
"""A family of dsx's own modules."""

PresetFamily: TypeAlias = Literal["gpt2", Family, "gpt_neox", "gemma2"]
RETIRED: Final = ("gpt2", "gpt_neox", "gemma2")
"""Families of which an earlier dsx had modules of its own."""
"""A family with built-in models. Those that dsx has no modules of are made of transformers'."""

Recompute = Literal["none", "selective", "full", "offload"]

MlpTiles = int | Literal["auto"]
"""Parts of a rank's tokens that feed-forwards compute one after the other, as ``dsx.mlp_tiles`` has it."""

ContextMethod = Literal["all_gather", "ulysses", "ring"]
"""How attention sees the whole of a sequence that several ranks share: every rank gathers all keys and
values, or all-to-alls give it whole sequences of some heads (Jacobs et al. 2023, arXiv:2309.14509), or the
other ranks' keys and values come one after the other (Liu et al. 2023, arXiv:2310.01889)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding, as transformers' modeling_rope_utils.py has it.

    Attributes:
        theta: Base of the angles.
        kind: How they are scaled for longer sequences.
        share: Part of each head that is rotated, its first elements.
        factor: Scaling of every kind but ``default``.
        low_frequency_factor: Of ``llama3``.
        high_frequency_factor: Of ``llama3``.
        original_positions: Positions before scaling, of ``llama3`` and ``yarn``.
        beta_fast: Turns over the original positions above which ``yarn`` leaves a pair alone.
        beta_slow: Turns below which it scales a pair in full.
        truncate: Whether it rounds the pairs between which it interpolates to whole ones.
        attention_factor: What it multiplies cosine and sine by.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    share: float = 1.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What is trained of a model that is frozen otherwise, in the words of PEFT's LoraConfig.

    Attributes:
        type: LoRA (arXiv:2106.09685), or with the direction and the magnitude of each output's weights apart
            (DoRA, arXiv:2402.09353).
        rank: Of the products that are added to matrices.
        alpha: The products are multiplied by it over rank, or over rank's root if ``rslora``
            (arXiv:2312.03732).
        dropout: Probability of leaving out an input of theirs.
        targets: Which linears get one: "all-linear", a regular expression of a module's whole name, or names
            and endings of names.
        target_parameters: Which stacks of experts' matrices do: names and endings of parameters' names.
        train_also: Endings of the names of modules that are trained themselves.
        quantization: Form of the frozen matrices of blocks' linears.
        start: What the products began as, if that was taken out of the matrices that they are added to: the
            largest singular vectors (PiSSA, arXiv:2404.02948) or columns of QR (OLoRA, arXiv:2406.01775).
    """

    type: Literal["lora", "dora"] = "lora"
    rank: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    rslora: bool = False
    targets: str | tuple[str, ...] = "all-linear"
    target_parameters: tuple[str, ...] = ()
    train_also: tuple[str, ...] = ()
    quantization: Quantization = "none"
    start: Literal["none", "pissa", "olora"] = "none"

    @property
    def scale(self) -> float:
        """What the products are multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """An architecture's sizes in elements and probabilities in 0..1; :mod:`dsx.models.hf_config` reads it.

    Attributes:
        num_kv_heads: Key/value heads; equal to ``num_heads`` without grouped-query attention.
        head_dim: Size of one head; ``num_heads * head_dim`` need not equal ``hidden_size``.
        ffn_size: Width of the MLP between its two linears.
        max_positions: Longest sequence the positions allow.
        attention_bias: Biases on the fused QKV projection.
        windows: Per block, how many positions a token attends to, its own included; 0 means all before it.
            Empty means all in every block.
        qk_norm: RMSNorm of each query and key head before rotation (Qwen3).
        pad_token_id: The token whose row the word embedding gives no gradient; None for none.
        shared_kv: Keys and values are a parameter beside the queries', whole on every tensor-parallel rank,
            because ranks share key/value heads: see :meth:`for_tensor`.
        adapter: What is trained in place of the whole; None for all of it.
        freeze: Regular expressions of the parameters that are not trained: see
            :func:`dsx.models.params.param_specs`.
    """

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm: Literal["layernorm", "rmsnorm"]
    norm_epsilon: float
    activation: Literal["gelu", "gelu_new", "silu", "relu"]
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    rope: Rope
    attention_dropout: float = 0.0
    init_std: float = 0.02
    windows: tuple[int, ...] = ()
    qk_norm: bool = False
    pad_token_id: int | None = None
    shared_kv: bool = False
    adapter: Adapter | None = None
    freeze: tuple[str, ...] = ()

    def for_tensor(self, tensor: int) -> Self:
        """The same model in the form of its parameters that ``tensor`` tensor-parallel ranks train."""
        return replace(self, shared_kv=self.keeps_whole(tensor))

    def keeps_whole(self, tensor: int) -> bool:
        """Whether so many ranks, each with query heads of its own, have to share key/value heads."""
        fits = self.num_heads % tensor == tensor % self.num_kv_heads == 0
        return fits and tensor > self.num_kv_heads

    @property
    def stream(self) -> tuple[int, ...]:
        """Sizes of what goes from block to block, samples and tokens aside."""
        return (self.hidden_size,)

    @property
    def head_size(self) -> int:
        """Columns of the head."""
        return self.hidden_size

    @property
    def tower_params(self) -> tuple[ParamSpec, ...]:
        return ()  # no tower of pictures stands before dsx's own modules

    @property
    def dropout_in_blocks(self) -> float:
        """The largest probability of any dropout inside a block."""
        others = 0.0 if self.adapter is None else self.adapter.dropout
        return max(self.attention_dropout, others)

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def rotary_size(self) -> int:
        """Elements of each head that are rotated."""
        return int(self.head_dim * self.rope.share)

    def window(self, block: int, sequence_length: int) -> int:
        """The window of a block if it is shorter than the sequence, else 0: then it leaves nothing out."""
        return _window(self.windows, block, sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The auxiliary losses of routers; :mod:`dsx.hub.balance` computes them.

    Attributes:
        experts: Number of experts.
        chosen: Experts that a token is sent to.
        coefficient: What the loss for equally busy experts is multiplied by; 0 without one.
        z_loss: What the z-loss is multiplied by; 0 without one.
    """

    experts: int
    chosen: int = 0
    coefficient: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A causal language model made of transformers' own modules; :mod:`dsx.hub.read` makes it of a config.

    Its layer list is that of dsx's families: the word embedding, what the family does before its blocks if
    that is anything (``Positions``), the blocks, what follows them (``FinalNorm``) and the head.

    Attributes:
        family: ``model_type`` of its config.
        config: That config, as JSON.
        tensor_plan: What the user changes in the family's tensor plan: (pattern, style), None for no cut.
        num_layers: Blocks.
        stream: Sizes of what goes from block to block, samples and tokens aside.
        vocab_size: Rows of the head.
        head_size: Its columns.
        max_positions: Longest sequence that the config allows.
        padding: The token that positions do not count, which begin behind its number; None if they count all.
        tied_embeddings: Whether the head is the word embedding's table.
        kinds: Kind of every layer of the layer list.
        alike: For every block, the first one that does the same with tensors of the same shapes.
        params: Every parameter, vocabulary padding aside.
        buffers: Every tensor that is stored with them and not trained.
        order: Names of both in the order of transformers' module.
        heads: Attention heads, key/value heads, if the plan cuts attention head by head; else None.
        query_heads: Attention heads, whether it does or not; 0 if nothing says how many there are.
        mixer_heads: What heads, and groups of them, of recurrent mixers that are cut have in common; else 0.
        mixers: Patterns of the tensor plan that cut these, and names of their parameters; none if it
            cuts other parts of blocks by one of the patterns, which are not derived together.
        attention_with_mixers: Whether they cut attention too, as in blocks of several kinds with the same
            names: its heads then count among ``mixer_heads``.
        pair_projections: Parameters that give keys or values, each rank its own heads, with their heads, of
            which layers may have different numbers.
        own_values: (name, name in transformers' model) of every parameter whose fresh values only the
            family's own code can give.
        query_size: Width of all query heads; 0 if the config does not say it.
        windows: As :attr:`ModelSpec.windows`, where the config names each layer's attention.
        looked_up: Parameters that are tables, of which a token takes a row and is not multiplied by it.
        routed: Share of the experts that a token is sent to; 1 without experts.
        balance: The auxiliary loss of its routers; None without one.
        no_sequence: Why sequence parallelism is refused; None if it is not.
        no_gathering: Why ZeRO-3, whose ranks gather parameters together, is.
        block: Number of the one block that is looked at, of a model made for a record; None for all.
        adapter: What is trained in place of the whole; None for all of it.
        freeze: As :attr:`ModelSpec.freeze`.
        pictures: Config of the composite model that it is the language model of, as JSON, if the tower of
            that runs too (:mod:`dsx.hub.tower`); empty if it does not.
        tower: Regular expressions of the tower's tensors that are trained, where there is no adapter.
        tower_params: Every tensor of the tower, and whether these name it.
    """

    family: str
    config: str
    tensor_plan: tuple[tuple[str, str | None], ...] = ()
    num_layers: int
    hidden_size: int
    stream: tuple[int, ...]
    vocab_size: int
    head_size: int
    max_positions: int
    tied_embeddings: bool
    kinds: tuple[str, ...] = field(repr=False)
    alike: tuple[int, ...] = field(repr=False)
    params: tuple[ParamSpec, ...] = field(repr=False, compare=False)
    buffers: tuple[ParamSpec, ...] = field(default=(), repr=False, compare=False)
    order: tuple[str, ...] = field(repr=False, compare=False)
    heads: tuple[int, int] | None = None
    query_heads: int = field(default=0, repr=False)
    mixer_heads: int = 0
    mixers: tuple[frozenset[str], frozenset[str]] = field(default=(frozenset(), frozenset()), repr=False)
    attention_with_mixers: bool = False
    pair_projections: frozenset[tuple[str, int]] = field(default=frozenset(), repr=False)
    own_values: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    query_size: int = 0
    windows: tuple[int, ...] = field(default=(), repr=False)
    looked_up: frozenset[str] = field(default=frozenset(), repr=False)
    routed: float = 1.0
    balance: Balance | None = None
    padding: int | None = None
    no_sequence: str | None = None
    no_gathering: str | None = None
    block: int | None = None
    adapter: Adapter | None = None
    freeze: tuple[str, ...] = ()
    pictures: str = ""
    tower: tuple[str, ...] = ()
    tower_params: tuple[ParamSpec, ...] = field(default=(), repr=False, compare=False)

    def window(self, block: int, sequence_length: int) -> int:
        return _window(self.windows, block, sequence_length)

    def block_of(self, layer: int) -> int:
        """Number of the first block that is like layer ``layer`` of the layer list, which is a block."""
        return self.alike[layer - self.kinds.index("Block")]

    def for_tensor(self, tensor: int) -> Self:
        """The same model with the cut of its parameters that ``tensor`` tensor-parallel ranks train."""
        if not self.keeps_whole(tensor):
            return self
        whole = {name for name, pairs in self.pair_projections if pairs % tensor}
        plan, heads = dict(self.tensor_plan), self.heads
        if self.mixer_heads % tensor:
            patterns, names = self.mixers
            whole, plan = whole | names, plan | dict.fromkeys(patterns)
            heads = None if self.attention_with_mixers else heads
        params = tuple(replace(s, split=None, parts=()) if s.name in whole else s for s in self.params)
        return replace(self, params=params, tensor_plan=tuple(sorted(plan.items())), heads=heads)

    def keeps_whole(self, tensor: int) -> bool:
        """Whether so many ranks have to share key/value heads, or to have recurrent mixers whole."""
        return (self.heads is not None and self.heads[1] % tensor != 0) or self.mixer_heads % tensor != 0

    @property
    def whole(self) -> tuple[tuple[str, float], ...]:
        """What tensor parallelism leaves whole: (matrix of blocks, its share of the blocks' parameters)."""
        return tuple(self.left_whole(lambda spec: spec.numel).items())

    def left_whole(self, weigh: Callable[[ParamSpec], float]) -> dict[str, float]:
        """The share of each matrix of :attr:`whole` in what ``weigh`` says of the blocks' parameters."""
        held = [spec for spec in self.params if ".block." in spec.name and not spec.adapts]
        total, found = sum(map(weigh, held)), dict[str, float]()
        for spec in held:
            if spec.split is None and len(spec.shape) > 1:
                path = spec.name.partition(".block.")[2].removesuffix(".weight")
                found[path] = found.get(path, 0.0) + weigh(spec)
        return {path: weight / total for path, weight in found.items()}

    @property
    def experts(self) -> dict[int, int]:
        """How many experts the blocks have that have any in stacks, by the block's number."""
        stacks = (spec for spec in self.params if spec.experts == 0 and not spec.adapts)
        return {spec.layer - self.kinds.index("Block"): spec.shape[0] for spec in stacks}

    def unshared_experts(self, ranks: int) -> str | None:
        """Why ``ranks`` ranks cannot hold the experts of a layer together; None if they can."""
        counts = set(self.experts.values())
        if not counts:
            return (
                f"{self.family}: no block has experts in stacks that transformers' registry of experts knows"
            )
        return next(
            (f"{each} experts of a layer do not divide by it" for each in counts if each % ranks), None
        )

    def uncut(self, tensor: int) -> str | None:
        """Why ``tensor`` ranks cannot share the model; None if they can."""
        if tensor == 1:
            return None
        own = self.for_tensor(tensor)
        if own.heads is not None:
            queries, pairs = own.heads
            several = {pairs} | {each for _, each in self.pair_projections}
            pairs = next((each for each in several if each % tensor and tensor % each), pairs)
            shared = self.pair_projections and tensor % pairs == 0
            if queries % tensor or (pairs % tensor and not shared):
                return f"attention heads = {queries}, key/value heads = {pairs}: they cannot be shared by it"
        params = own.params
        nothing = all(spec.split is None or spec.pad_multiple is not None for spec in params)
        if self.mixer_heads % tensor and (nothing or not self.mixers[0]):
            return f"heads or groups of recurrent mixers = {self.mixer_heads}: they cannot be shared by it"
        if nothing:
            return (
                f"transformers has no tensor plan for {self.family}, and a small model of it shows none, so "
                "that nothing but the vocabulary would be cut; dsx.parallel.tensor_plan takes one"
            )
        for spec in params:
            sizes = spec.parts or (() if spec.split is None else (spec.shape[spec.split],))
            if spec.pad_multiple is None and any(size % tensor for size in sizes):
                return f"{spec.hf[0]}: {max(sizes)} of dim {spec.split} are not divisible by it"
        return None


def _window(windows: tuple[int, ...], block: int, sequence_length: int) -> int:
    window = windows[block] if windows else 0
    return window if window < sequence_length else 0


Model: TypeAlias = ModelSpec | HubModel
"""A model that dsx builds: of its own modules, or of transformers'."""
