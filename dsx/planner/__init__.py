"""Chooses the layout with the shortest step on a cluster, and schedules and cuts from measured costs."""
