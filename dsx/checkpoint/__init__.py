"""Checkpoints on disk: what they hold, in any format and layout, and how one becomes another."""
