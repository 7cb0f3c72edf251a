"""``dsx verify``: whether a layout trains as one process does, and if not, what the likely mistake is."""
