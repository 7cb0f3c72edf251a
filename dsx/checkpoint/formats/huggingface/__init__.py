"""Hugging Face model folders: as catalogs of any checkpoint's tensors, and as weights of a model."""
