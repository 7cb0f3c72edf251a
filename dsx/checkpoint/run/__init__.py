"""Checkpoints of a run: what each rank writes and wants back, and the state outside tensors."""
