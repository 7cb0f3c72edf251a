"""Checkpoint formats that dsx reads and writes, one file each."""
