"""Train on samples of your own: any object with a length, a sample at each index, and a digest.

    deepspeed --num_accelerators 2 recipes/own_data.py configs/zero3.json

Here they are sums, such as "27+915=942", made when they are asked for. A torch Dataset or a datasets.Dataset
of token ids does as well; dsx.OwnCorpus says what a sample may be. Console, W&B, evaluation, faults and
resuming are as in gpt_3d.py, which explains the steps.
"""

from __future__ import annotations

import random

import dsx


class Sums:
    """Sample i is the bytes of some sums, one more than the model reads, always the same for the same i."""

    def __init__(self, count: int, length: int, name: str) -> None:
        self.count, self.length, self.name = count, length, name
        self.digest = f"{name}: {count} x {length}"
        self.held_out = None if name == "held out" else Sums(count // 10, length, "held out")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[int]:
        chance, text = random.Random(f"{self.name}/{index}"), ""  # noqa: S311 (no secrets)
        while len(text) <= self.length:
            a, b = chance.randrange(1000), chance.randrange(1000)
            text += f"{a}+{b}={a + b}\n"
        return list(text[: self.length + 1].encode())


def main() -> int:
    """Read the config, build the engine, train on the sums, evaluate, save."""
    arguments = dsx.parse_arguments(description=__doc__)
    terms = ("dsx.data.source=own", "dsx.train.output=runs/own-data-{layout}")
    config = dsx.load_config(
        arguments.config,
        world_size=dsx.world_size(),
        rank=dsx.rank(),
        overrides=(*terms, *arguments.overrides),
    )
    dsx.recipe.check_memory(config)
    parallel, train = config.dsx.parallel, config.dsx.train
    corpus = Sums(100_000, config.sequence_length, "sums")
    with (
        dsx.distributed(
            config.mesh,
            sequence_parallel=parallel.sequence_parallel,
            seed=train.seed,
            islands=config.islands,
        ) as groups,
        dsx.recipe.Guard(config, groups) as guard,
    ):
        engine = dsx.recipe.build_engine(config, groups)
        state = dsx.recipe.resume(config, engine, corpus)
        cursor = state.get("data_cursor", 0)
        batches = dsx.recipe.training_batches(config, corpus, dp_rank=groups.share, cursor=cursor)
        monitor = dsx.recipe.Monitor(config, engine, corpus, state)
        guard.follow(engine, state)
        while engine.global_steps < train.steps and not guard.must_stop:
            monitor.before_step()
            monitor.step(engine.train_batch(batches))
            if guard.rolled_back(monitor):
                cursor = guard.data_cursor
                batches = dsx.recipe.training_batches(config, corpus, dp_rank=groups.share, cursor=cursor)
                continue
            step = engine.global_steps
            if dsx.recipe.is_due(step, every=train.eval_every, last=train.steps):
                monitor.evaluation(dsx.recipe.evaluate(config, engine, corpus))
            if guard.must_stop or dsx.recipe.is_due(step, every=train.save_every, last=train.steps):
                dsx.recipe.save(config, engine, corpus, monitor, guard)
        if train.export_hf and not guard.must_stop:
            dsx.recipe.export(config, engine, monitor)
        monitor.finish()
    return guard.exit_code


if __name__ == "__main__":
    dsx.run(main)
