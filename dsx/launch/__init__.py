"""From launched processes to process groups: start, preflight, the environment."""
