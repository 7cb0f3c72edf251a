"""torch's compilers are loaded by what compiles, and not before; what compiles then finds torch's own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import deepspeed
from dsx.launch.processes import load_compilers_late

late = sys.argv[1] == "late"
if late:
    load_compilers_late()
else:
    import torch._dynamo

weight = torch.nn.Parameter(torch.arange(6.0))
optimizer = torch.optim.AdamW([weight], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
loaded = [name for name in sys.modules if name.startswith(("torch._dynamo.", "torch._inductor"))]
assert bool(loaded) != late, loaded


@torch.compile(backend="eager")
def forward(x):
    optimizer.zero_grad()  # which torch keeps out of graphs
    return x * 2


import torch._dynamo.config
from deepspeed.runtime.zero.muon.original_muon import zeropower_via_newtonschulz5

assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
doubled = forward(torch.ones(2))
torch.compiler.set_stance("force_eager")  # inductor takes half a minute
orthogonal = zeropower_via_newtonschulz5(torch.eye(4), 5)
(broken,) = torch._dynamo.utils.counters["graph_break"].values()
kind = type(sys.modules["torch._dynamo"]).__name__
print(weight.tolist(), doubled.tolist(), orthogonal.shape, broken, kind)
"""


def said(*words: str, script: str = SCRIPT) -> str:
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_nothing_is_loaded_before_something_compiles_and_nothing_differs_after():
    late = said("late")
    assert late == said("now")
    assert late.endswith("1 module")


RECORDED = """
import sys
import torch

late = sys.argv[1] == "late"
if not late:
    import torch._dynamo

from dsx.checkpoint.claims import model_of
from dsx.memory.layer_record import LayerRequest, Shape
from dsx.memory.record_request import record_request
from dsx.models.presets import find_preset

model = model_of(find_preset("llama", "tiny").config)
sizes = {"tensor": 2, "sequence_parallel": True, "micro_batch": 2, "sequence_length": 64, "width": 2}
shape = Shape(model=model, recompute="full", **sizes)
kinds = ("WordEmbedding", "Block")
records = [record_request(LayerRequest(shape=shape, kind=kind, divided=True)) for kind in kinds]
assert ("torch._dynamo" in sys.modules) != late  # nor does a stand-in stay, which a process group would ask
print(*(record.to_json() for record in records))
"""


def test_recording_a_layer_loads_no_compiler_and_gives_the_same_record():
    late = said("late", script=RECORDED)
    assert late == said("now", script=RECORDED)
    assert "_scaled_dot_product" in late


FIRST_STEP = """
import sys
import torch
from dsx.engine.zero.calls import PlainCalls
from dsx.nn.block import ACTIVATIONS, gated


class Engine:
    module = module_forward_pre_hook = module_forward_post_hook = optimizer = torch.nn.Identity()
    remove = staticmethod(lambda: None)

Engine.module.remove = Engine.remove
calls = PlainCalls(Engine(), type("Backwards", (), {"begin": lambda self, boundary: None})(), None)
torch.manual_seed(0)
gradients = []
for activation in ACTIVATIONS:
    leaves = [torch.randn(2, 5, 16, requires_grad=True)]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    given = torch.randn(2, 5, 8)
    calls.backward((gated(leaves[0], activation),), (given,), boundary=False, is_loss=False)
    gradients.append((activation, leaves, given))
assert "sympy" not in sys.modules
for activation, (own, other), given in gradients:
    gate, up = other.chunk(2, dim=-1)
    torch.autograd.backward(ACTIVATIONS[activation](gate) * up, given)
    assert torch.equal(own.grad, other.grad), activation
assert "sympy" in sys.modules  # else torch needs it no longer
print("equal", len(gradients))
"""


def test_backward_with_given_gradients_is_torchs_without_sympy():
    command = [sys.executable, "-c", FIRST_STEP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines()[-1:] == ["equal 4"], done.stderr


SHARES = """
import os
import torch
from dsx.launch.processes import share_cores

torch.set_num_threads(4)  # as torch takes by itself on four cores
os.sched_getaffinity = lambda _: {0, 1, 2, 3, 4, 5, 6, 7}
for said, ranks in ((None, 1), (None, 3), (None, 8), (None, 9), ("1", 8)):
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ.pop("OMP_NUM_THREADS", None) if said is None else os.environ.update(OMP_NUM_THREADS=said)
    share_cores()
    print(torch.get_num_threads())
    torch.set_num_threads(4)
del os.sched_getaffinity  # as on macOS
os.cpu_count = lambda: 2
os.environ.pop("OMP_NUM_THREADS")
share_cores()
print(torch.get_num_threads())
"""


def test_ranks_of_a_machine_share_its_cores_unless_they_are_told():
    command = [sys.executable, "-c", SHARES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    # Never more than the program has; OMP_NUM_THREADS torch heeds by itself when it is loaded.
    assert done.stdout.split()[-6:] == ["4", "2", "1", "1", "4", "1"]
