"""Parts of tools/bench_planner.py: what arXiv:2104.04473 published, and the planner's predictions of it."""
