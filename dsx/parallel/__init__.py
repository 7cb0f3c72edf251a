"""Who holds what: the mesh of ranks, pipeline stages, ZeRO partitions, process groups."""
