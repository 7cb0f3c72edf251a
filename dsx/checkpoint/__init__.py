"""Checkpoints on disk: the manifest that describes one, and files that are whole or absent."""
