"""The layers of :mod:`dsx.nn`, the loss and one chunk of them as the ledger sees them.

Shapes as in :mod:`dsx.memory.ops`.

The cross entropy of :mod:`dsx.nn.loss` as :mod:`dsx.memory.ledger` sees it: float32 of 2^23 logits at a time.

Shapes: N tokens of a micro-batch, V this rank's rows of the padded vocabulary, n = 2^23 / V tokens; w bytes
of a logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dsx.memory.attention import Core
from dsx.memory.ledger import Label, Leaf, Tensor
from dsx.memory.ops import Ops, label
from dsx.models.params import layer_kinds
from dsx.models.spec import ModelSpec, Recompute

LOGITS_AT_ONCE = 1 << 23
"""nn/loss.py, _ELEMENTS_AT_ONCE."""

_SOURCE = "nn/loss.py _CrossEntropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """nn/loss.py _CrossEntropy, overwriting the logits.

    Attributes:
        ops: Records.
    """

    ops: Ops

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [B, S, V] and labels [B, S] to a scalar."""
        ops = self.ops
        check_ids(ops, labels, ignored=True)
        tokens = labels.numel
        column, mine = self._own(tokens)
        statistics = self._statistics(logits, tokens)
        log_sum, target = self._per_token("log-sum-exp", 4, tokens), self._per_token("target", 4, tokens)
        self._per_token("mask", 1, tokens)
        if ops.tp > 1:
            log_sum, target = self._combined(tokens)
        valid, count = self._per_token("mask", 1, tokens), ops.tape.scratch(_label("count", "8"), 8)
        share = self._per_token("share", 4, tokens)
        loss = self._mean(tokens)
        self._record(logits, loss, (logits, log_sum, column, mine, share))
        del statistics, target, valid, count
        return loss

    def _record(self, logits: Tensor, loss: Tensor, saved: tuple[Tensor, ...]) -> None:
        tokens = saved[1].numel

        def backward(saved: tuple[Tensor, ...], _: Tensor) -> list[Tensor | None]:
            scale = self._per_token("scale", 4, tokens)
            wide: Tensor | None = None
            chances: Tensor | None = None
            for rows, columns in _chunks(saved[0], tokens):
                # Python keeps the chunk before until this one is there.
                wide = self._wide(saved[0], rows, columns) or wide
                what = _label("probabilities", "4 n V, n = 2^23 / V")
                chances = self.ops.tape.new(what, 4, rows, columns)
                signs = [self._per_token("signs", 4, rows) for _ in range(2)]
                signs.clear()
            del scale, wide, chances
            return [saved[0].detach()]

        self.ops.tape.record((logits,), (loss,), backward, saved=saved)

    def _own(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Labels as columns of this rank, and which of them are its own."""
        shifted = self._per_token("columns", 8, tokens)
        masks = [self._per_token("mask", 1, tokens) for _ in range(3)]
        mine = masks.pop()
        masks.clear()
        column = self._per_token("columns", 8, tokens)
        del shifted
        return column, mine

    def _statistics(self, logits: Tensor, tokens: int) -> list[Tensor]:
        """Two numbers a token, and a chunk of the logits in float32 at a time."""
        kept: list[Tensor] = []
        wide: Tensor | None = None
        for rows, columns in _chunks(logits, tokens):
            wide = self._wide(logits, rows, columns) or wide
            kept += [self._per_token("statistics", 4, rows) for _ in range(2)]
        del wide
        return kept

    def _combined(self, tokens: int) -> tuple[Tensor, Tensor]:
        """nn/loss.py _combine: log-sum-exp and targets over the tensor-parallel ranks."""
        highest, lower = self._per_token("highest", 4, tokens), self._per_token("differences", 4, tokens)
        sums = self._per_token("sums", 8, tokens)
        del lower
        logarithm, total = self._per_token("logarithm", 4, tokens), self._per_token("log-sum-exp", 4, tokens)
        del highest, logarithm
        return total, sums

    def _mean(self, tokens: int) -> Tensor:
        each, mask = self._per_token("losses", 4, tokens), self._per_token("mask", 1, tokens)
        del mask
        total = self.ops.tape.scratch(_label("loss", "4"), 4)
        del each
        loss = self.ops.tape.new(_label("loss", "4"), 4)
        del total
        return loss

    def _wide(self, logits: Tensor, rows: int, columns: int) -> Tensor | None:
        if logits.width >= 4:
            return None
        return self.ops.tape.new(_label("logits in float32", "4 n V, n = 2^23 / V"), 4, rows, columns)

    def _per_token(self, name: str, width: int, tokens: int) -> Tensor:
        return self.ops.tape.new(_label(name, f"{width} N"), width, tokens)


def _label(name: str, formula: str) -> Label:
    return label(name, formula, _SOURCE, "logits")


def _chunks(logits: Tensor, tokens: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of each chunk."""
    columns = logits.shape[-1]
    step = max(1, LOGITS_AT_ONCE // columns)
    for start in range(0, tokens, step):
        yield min(step, tokens - start), columns


def check_ids(ops: Ops, ids: Tensor, *, ignored: bool = False) -> None:
    """nn/embedding.py check_ids: three masks at once."""
    what = label("id checks", "B S", "nn/embedding.py check_ids")
    masks = [ops.tape.new(what, 1, *ids.shape) for _ in range(3)]
    del masks[:2]
    if ignored:
        ops.tape.new(what, 1, *ids.shape)
    ops.tape.scratch(what, 1)


_EMBEDDING = "nn/embedding.py VocabParallelEmbedding.forward"


@dataclass(slots=True, kw_only=True)
class Layers:
    """Runs layers of a model's layer list on one rank.

    Attributes:
        model: The architecture.
        ops: The rank's operations.
        weights: Its parameters by name (:func:`dsx.models.params.param_specs`).
        recompute: What blocks compute again.
    """

    model: ModelSpec
    ops: Ops
    weights: Mapping[str, Leaf]
    recompute: Recompute = "none"

    def run(self, layers: Sequence[int], x: Tensor, labels: Tensor | None) -> Tensor:
        """Forward of ``layers``; with the last one and ``labels``, the loss (engine/chunks.py Chunks)."""
        return self.ops.module((), x, lambda x: self._chunk(layers, x, labels))

    def _chunk(self, layers: Sequence[int], x: Tensor, labels: Tensor | None) -> Tensor:
        kinds = layer_kinds(self.model)
        forwards: dict[str, Callable[[int, Tensor], Tensor]] = {
            "WordEmbedding": self.word_embedding,
            "Positions": self.positions,
            "Block": self.block,
            "FinalNorm": lambda layer, x: self._norm(layer, "norm", x),
            "Head": self.head,
        }
        for layer in layers:
            x = self.ops.module((), x, partial(forwards[kinds[layer]], layer))
        if labels is None or layers[-1] != len(kinds) - 1:
            return x
        return self.loss(x, labels)

    def _weight(self, layer: int, name: str) -> Leaf:
        return self.weights[f"{layer}.{name}"]

    def _optional(self, layer: int, name: str) -> Leaf | None:
        return self.weights.get(f"{layer}.{name}")

    def _norm(self, layer: int, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weight(layer, f"{name}.weight"), self._optional(layer, f"{name}.bias")
        return self.ops.module((weight, bias), x, lambda x: self.ops.norm(x, weight, bias))

    def _head_norm(self, layer: int, name: str, x: Tensor) -> Tensor:
        weight = self._weight(layer, f"{name}.weight")
        return self.ops.module((weight,), x, lambda x: self.ops.norm(x, weight, None, over_heads=True))

    def _column(self, layer: int, module: str, x: Tensor, *, name: str) -> Tensor:
        weight, bias = self._weight(layer, f"{module}.weight"), self._optional(layer, f"{module}.bias")
        body = partial(self.ops.linear, weight=weight, bias=bias, column=True, name=name)
        return self.ops.module((weight, bias), x, body)

    def _row(self, layer: int, module: str, x: Tensor, *, name: str) -> Tensor:
        weight, bias = self._weight(layer, f"{module}.weight"), self._optional(layer, f"{module}.bias")
        body = partial(self.ops.row_linear, weight=weight, bias=bias, name=name)
        return self.ops.module((weight, bias), x, body)

    def block(self, layer: int, x: Tensor) -> Tensor:
        """nn/block.py Block.forward."""
        if self.recompute == "full":
            return self.ops.tape.checkpoint(lambda x: self._residuals(layer, x), x)
        return self._residuals(layer, x)

    def _residuals(self, layer: int, x: Tensor) -> Tensor:
        """nn/block.py Block._residuals."""
        source = "nn/block.py Block._residuals"
        probability = self.model.residual_dropout
        branch = self.ops.module((), self._norm(layer, "norm_1", x), partial(self._attention, layer))
        branch = self.dropout(branch, probability)
        middle = self.ops.add(x, branch, name="after attention", source=source)
        del branch
        if not self.model.parallel_residual:
            x = middle
        branch = self.ops.module((), self._norm(layer, "norm_2", x), partial(self._mlp, layer))
        branch = self.dropout(branch, probability)
        return self.ops.add(middle, branch, name="block output", source=source)

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """nn/dropout.py Dropout, a module also where it drops nothing."""
        return self.ops.module((), x, lambda x: self.ops.dropout(x, probability))

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        """nn/attention.py Attention.forward."""
        model, ops = self.model, self.ops
        qkv = self._column(layer, "attention.qkv", x, name="queries, keys, values")
        block, length = layer - layer_kinds(model).index("Block"), qkv.shape[1]
        names = ("q_norm", "k_norm") if model.qk_norm else ()
        core = Core(
            ops=ops,
            heads=model.num_heads // ops.tp,
            kv_heads=model.num_kv_heads // ops.tp,
            head_dim=model.head_dim,
            rotary_size=model.rotary_size,
            dropout=model.attention_dropout > 0.0,
            masked=bool(model.window(block, length)),
            norms=tuple(partial(self._head_norm, layer, f"attention.{name}") for name in names),
        )
        context = ops.tape.checkpoint(core, qkv) if self.recompute == "selective" else core(qkv)
        return self._row(layer, "attention.out", context, name="attention output")

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        """nn/block.py Mlp.forward."""
        if self.model.gated_mlp:
            hidden = self.ops.gated(self._column(layer, "mlp.gate_up", x, name="gate and up"))
        else:
            hidden = self.ops.activation(self._column(layer, "mlp.up", x, name="up"))
        return self._row(layer, "mlp.down", hidden, name="down")

    def word_embedding(self, layer: int, ids: Tensor) -> Tensor:
        """Rows of the table; each rank has some, and the sum over the ranks has all."""
        weight = self._weight(layer, "word.weight")
        return self.ops.module((weight,), ids, lambda ids: self._look_up(weight, ids))

    def _look_up(self, weight: Leaf, ids: Tensor) -> Tensor:
        ops, tape = self.ops, self.ops.tape
        check_ids(ops, ids)
        mask = None
        if ops.tp > 1:
            shifted, ids, mask = self._own_rows(ids)
        y = tape.new(
            label("word embedding", "B S H w", _EMBEDDING), ops.width, *ids.shape, self.model.hidden_size
        )
        tape.record((weight,), (y,), self._table_gradient(weight), saved=(ids,))
        if mask is None:
            return y
        masked = y.detach()
        what = label("masked gradient", "B S H w", _EMBEDDING)
        tape.record((y,), (masked,), lambda _, dy: [ops.like(what, dy)], saved=(mask,))
        del y
        total = ops.reduce_from(masked)
        del shifted
        return total

    def _own_rows(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tape = self.ops.tape
        rows = tape.new(label("rows", "8 B S", _EMBEDDING), 8, *ids.shape)
        masks = [
            tape.new(label("mask of other ranks' rows", "B S", _EMBEDDING), 1, *ids.shape) for _ in range(3)
        ]
        mask = masks.pop()
        masks.clear()
        own = tape.new(label("rows", "8 B S", _EMBEDDING), 8, *ids.shape)
        return rows, own, mask

    def _table_gradient(self, weight: Leaf) -> Callable[..., Sequence[Tensor | None]]:
        ops = self.ops
        what = Label("gradients", "table gradient", "V H w", "nn/embedding.py _start_table_gradient")

        def start(ids: Tensor, dy: Tensor) -> Callable[[], Tensor]:
            def finish() -> Tensor:
                assert ids is not None  # both stay until here
                assert dy is not None
                return ops.tape.new(what, ops.width, *weight.shape)

            return finish

        def backward(saved: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
            if ops.later is not None and ops.later.active:
                ops.later.keep(weight, start, saved[0], dy)
                return [None]
            return [start(saved[0], dy)()]

        return backward

    def positions(self, layer: int, x: Tensor) -> Tensor:
        """LearnedPositions and dropout."""
        weight = self._weight(layer, "position.weight")
        y = self.ops.module((weight,), x, lambda x: self._add_positions(weight, x))
        return self.dropout(y, self.model.embedding_dropout)

    def _add_positions(self, weight: Leaf, x: Tensor) -> Tensor:
        ops, tape = self.ops, self.ops.tape
        length, hidden, width = *x.shape[1:], x.width
        whole = length * ops.tp if ops.sequence else length
        source = "nn/embedding.py LearnedPositions.forward"
        table = ops.late(weight)
        rows = Tensor((whole, hidden), width, None)
        total = Label("gradients", "position gradient", "positions H w", source)
        tape.record((table,), (rows,), lambda *_: [tape.new(total, width, *weight.shape)])
        if ops.sequence:
            own = tape.new(label("own positions", "s H w", source), width, length, hidden)
            gathered = label("gradient of the positions", "S H w", source)
            tape.record((rows,), (own,), lambda *_: [tape.new(gathered, width, whole, hidden)])
            rows = own
            del own
        y = ops.like(label("embedding", "B s H w", source), x)
        part = label("gradient of the positions", "s H w", source)
        tape.record((x, rows), (y,), lambda _, dy: [dy.detach(), tape.new(part, width, length, hidden)])
        return y

    def head(self, layer: int, x: Tensor) -> Tensor:
        """The table as a column-parallel linear."""
        if not self.model.tied_embeddings:
            return self._column(layer, "word", x, name="logits")
        # engine/chunks.py TiedUse gathers the table that is not its own.
        weight = self._weight(0, "word.weight")
        return self.ops.module((weight,), x, lambda x: self._column(0, "word", x, name="logits"))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """nn/loss.py cross_entropy with overwrite_logits."""
        return Loss(ops=self.ops)(logits, labels)
