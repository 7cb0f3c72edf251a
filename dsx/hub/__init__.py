"""Any transformers model as a list of layers, and how transformers stores its tensors."""
