"""The doctor: everything that is wrong with a DeepSpeed config, found without DeepSpeed, torch or a GPU."""

from dsx.doctor.examine import Report, examine

__all__ = ["Report", "examine"]
