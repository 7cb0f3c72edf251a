"""What keeps a run safe: lost peers, hangs, signals, figures gone wrong."""
