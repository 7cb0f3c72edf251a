"""Parts of tools/bench_survival.py."""
