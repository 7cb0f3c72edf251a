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


def said(*words: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_nothing_is_loaded_before_something_compiles_and_nothing_differs_after():
    late = said("late")
    assert late == said("now")
    assert late.endswith("1 module")
