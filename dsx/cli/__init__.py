"""The ``dsx`` command, which imports nothing that a command does not need."""
