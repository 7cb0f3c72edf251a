"""transformers' Trainer, as people with a Trainer script and a DeepSpeed JSON know it, over dsx's engine."""
