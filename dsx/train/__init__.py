"""A run as people see it: recipe, console, metrics, curves, generated text."""
