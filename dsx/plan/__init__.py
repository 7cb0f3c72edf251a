"""Pure functions over :mod:`dsx.spec`: model and parameters, partitions, schedules, simulation, FLOPs.

Standard library only; nothing here starts a process, reads a file or knows a tensor library.
"""
