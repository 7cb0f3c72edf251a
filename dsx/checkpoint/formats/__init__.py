"""Checkpoint formats that dsx reads and writes."""
