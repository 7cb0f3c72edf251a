"""The ``dsx`` block of a DeepSpeed JSON: schema, loading, and resolving it for a world size.

It imports neither torch nor DeepSpeed, so that a bad config is refused within a fraction of a second.
"""
