"""Parts of tools/bench_islands.py: slow links, what trains over them, and held-out losses."""
