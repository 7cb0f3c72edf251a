"""The layer lists in DeepSpeed's own PipelineModule and PipelineEngine."""

import deepspeed
import pytest
import tiny_models
import torch
from deepspeed.pipe import PipelineModule

import ranks
from dsx.checkpoint.claims import model_of
from dsx.models.families import layers, loss
from dsx.nn.parallel import TensorParallel

STEPS, MICRO_BATCHES = 3, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 0.0,
    "steps_per_print": 1000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def pipeline_losses(rank, world_size, name, batches):
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    spec = model_of(tiny_models.CONFIGS[name].to_dict())
    one = TensorParallel()
    module = PipelineModule(
        layers(spec, one, dtype=torch.float32, seed=3),
        num_stages=world_size,
        loss_fn=loss(spec, one),
        partition_method="type:block",
    )
    engine = deepspeed.initialize(model=module, config=CONFIG)[0]
    return [engine.train_batch(iter(batches)).item() for _ in range(STEPS)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_stages_equal_one_process(name):
    """GPT-2's tied table lives on both stages."""
    ids, labels = tiny_models.batch(name, 4)
    labels[0, :5] = 1  # as many labels in each micro-batch, so that the mean of means is the mean
    expected = []
    model = tiny_models.Model(name, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        value = model.loss_fn(model(ids), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(value.item())
    batches = [(ids[:2], labels[:2]), (ids[2:], labels[2:])]
    for losses in ranks.run(pipeline_losses, 2, name, batches):
        assert losses == pytest.approx(expected, abs=2e-6)
