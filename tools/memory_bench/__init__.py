"""Parts of ``tools/bench_memory.py``."""
