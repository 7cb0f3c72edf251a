"""Any rank of any layout on one laptop: the real engine, tensors without storage, a group without peers.

torch's FakeTensors carry shapes, dtypes and lifetimes, and its ``fake`` process group answers every
collective at once; so a rank of a 70B model on 64 GPUs runs its real steps, DeepSpeed's included, and every
byte that it would hold is counted (:mod:`dsx.runtime.paper.meter`).
"""
