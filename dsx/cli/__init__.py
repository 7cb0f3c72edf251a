"""The ``dsx`` command: nothing imported that a command does not need."""
