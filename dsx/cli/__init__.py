"""The ``dsx`` command: one small file per command, nothing imported that a command does not need."""
