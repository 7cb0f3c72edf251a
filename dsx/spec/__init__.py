"""Frozen descriptions of a run: mesh, model, parameters, stages, ZeRO partitions, layout, schedule.

Standard library only. Everything else in dsx reads these objects; nothing derives the same fact twice.
"""
