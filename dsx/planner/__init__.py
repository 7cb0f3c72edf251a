"""What to choose: the layout of the shortest step on a cluster, schedules and cuts from measured costs."""
