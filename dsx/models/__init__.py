"""What is computed: a model's numbers, its parameters, where Hugging Face has them, presets, families."""
