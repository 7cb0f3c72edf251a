"""Fine-tune a Hugging Face model in 3D, from a folder with config.json, safetensors and a tokenizer.

    deepspeed --num_accelerators 8 recipes/finetune.py configs/chat_lora.json \
        --set dsx.model.path=Qwen2.5-7B-Instruct --set dsx.data.source=chats.jsonl

configs/chat_lora.json trains an adapter on the assistant's turns of chats, in the model's own chat template;
configs/finetune.json the whole model on the column "text" of dsx.data.source. `dsx data show CONFIG` prints
what is trained. The held-out loss is measured before and after. What comes out is again a Hugging Face
folder, tokenizer included, whatever the layout was: the model, or the adapter as PEFT has it.

    AutoModelForCausalLM.from_pretrained("runs/finetune-pp2-dp2-tp2/hf/step100")
    PeftModel.from_pretrained(model, "runs/chat-lora-pp2-dp2-tp2/hf/step200")

A run that was stopped continues from its last checkpoint when it is started again.
"""

from __future__ import annotations

import dsx

# What makes this recipe: it starts from weights and exports them. --set can change these keys, too.
TERMS = ("dsx.model.weights=load", "dsx.train.export_hf=true")


def main() -> int:
    """Read the model folder, measure, train, measure again, export."""
    # Everything that can be wrong with the config, the data or the folders is found here, by plain arithmetic
    # and file reading, before any rank waits for another.
    arguments = dsx.parse_arguments(description=__doc__)
    config = dsx.load_config(
        arguments.config,
        world_size=dsx.world_size(),
        rank=dsx.rank(),
        overrides=(*TERMS, *arguments.overrides),
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

        # Each rank reads its own slices of the safetensors: its stages' layers, its tensor-parallel share.
        # With dsx.adapter the model is frozen, and what is trained is added to it.
        model = dsx.recipe.build_model(config, groups)
        engine, *_ = dsx.initialize(model=model, config=config)

        # A checkpoint in the output folder precedes the model folder: it is this run, further on.
        state = dsx.recipe.resume(config, engine, corpus)
        batches = dsx.recipe.training_batches(
            config, corpus, dp_rank=groups.share, cursor=state.get("data_cursor", 0)
        )
        monitor = dsx.recipe.Monitor(config, engine, corpus, state)
        guard.follow(engine, state)

        # The held-out loss of the model as it is before training.
        if engine.global_steps == 0:
            monitor.evaluation(dsx.recipe.evaluate(config, engine, corpus))

        while engine.global_steps < train.steps and not guard.must_stop:
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

        # The ranks' slices are put together again, under Hugging Face's names; of an adapter, PEFT's.
        if train.export_hf and not guard.must_stop:
            dsx.recipe.export(config, engine, monitor)
        monitor.finish()
    return guard.exit_code


if __name__ == "__main__":
    dsx.run(main)
