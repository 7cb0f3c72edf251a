"""Train a GPT in 3D: tensor x pipeline x ZeRO data parallelism, from one DeepSpeed JSON.

    deepspeed --num_accelerators 8 recipes/gpt_3d.py configs/zero3.json
    torchrun --nproc_per_node 8 recipes/gpt_3d.py configs/zero3.json
    python recipes/gpt_3d.py configs/zero3.json --set dsx.train.steps=20

Any key of the config can be set on the command line, e.g. --set dsx.parallel.tensor=2. A run that was stopped
continues from its last checkpoint when it is started again.
"""

from __future__ import annotations

import dsx


def main() -> int:
    """Read the config, build the engine, train, evaluate, save."""
    # Everything that can be wrong with the config, the data or the output folder is found here, by plain
    # arithmetic and file reading, before any rank waits for another.
    arguments = dsx.parse_arguments(description=__doc__)
    config = dsx.load_config(
        arguments.config, world_size=dsx.world_size(), rank=dsx.rank(), overrides=arguments.overrides
    )
    dsx.recipe.check_memory(config)
    data = dsx.recipe.prepare_data(config)
    parallel, train = config.dsx.parallel, config.dsx.train

    # Process groups of the mesh: pipeline x data x tensor. NCCL on GPUs, gloo on CPUs.
    # The guard ends every rank when one fails or hangs, and turns SIGTERM into a save and a clean end.
    with (
        dsx.distributed(
            config.mesh,
            sequence_parallel=parallel.sequence_parallel,
            seed=train.seed,
            spare_ranks=config.spare_ranks,
            islands=config.islands,
        ) as groups,
        dsx.recipe.Guard(config, groups) as guard,
    ):
        corpus = dsx.recipe.open_data(config, data)

        # With dsx.profile: layers and links are timed, and what the config leaves open (schedule, chunks,
        # recompute, layers per stage) is chosen by simulated step. Without, the config stays as it is.
        config = dsx.recipe.measure(config, groups)

        # The model is a list of LayerSpecs; each rank builds the layers of its own stages and chunks, cut to
        # its tensor-parallel share, and DeepSpeed wraps them with the optimizer, precision and ZeRO stage.
        model = dsx.recipe.build_model(config, groups)
        engine, *_ = dsx.initialize(model=model, config=config)

        # A checkpoint in the output folder continues exactly: weights, optimizer, schedule, data, RNG, W&B.
        state = dsx.recipe.resume(config, engine, corpus)
        batches = dsx.recipe.training_batches(
            config, corpus, dp_rank=groups.share, cursor=state.get("data_cursor", 0)
        )
        monitor = dsx.recipe.Monitor(config, engine, corpus, state)
        guard.follow(engine, state)

        while engine.global_steps < train.steps and not guard.must_stop:
            # One optimizer step: every micro-batch through the pipeline, forward and backward, in the order
            # of the schedule; the gradient norm over the whole model; clip; update.
            monitor.before_step()
            loss = engine.train_batch(batches)
            monitor.step(loss)

            # A step with wrong figures (dsx.faults) ends the run, is skipped, or takes it back to its newest
            # checkpoint; the data then continues after the bad batch.
            if guard.rolled_back(monitor):
                batches = dsx.recipe.training_batches(
                    config, corpus, dp_rank=groups.share, cursor=guard.data_cursor
                )
                continue

            # Both are also due after the last step, and saving when a signal asks the run to stop.
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
