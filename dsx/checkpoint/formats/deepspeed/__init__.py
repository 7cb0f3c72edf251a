"""Stock DeepSpeed's checkpoints, read and written without DeepSpeed."""
