"""Memory of a training run before it runs, byte by byte and without torch.

:mod:`.tape` is autograd over sizes: operations that allocate, save and free. :mod:`.layers` writes dsx's
layers in it, :mod:`.states` what DeepSpeed keeps and takes around them, :mod:`.estimate` walks a schedule.
"""
