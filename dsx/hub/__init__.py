"""Models of any family of transformers, as layer lists made of the family's own modules."""
