"""``dsx verify``: does a layout train as one process does, and if not, what is the likely mistake."""
