"""What it means when a layout trains otherwise than one process: pure functions over numbers."""
