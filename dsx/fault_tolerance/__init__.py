"""What protects a run: lost peers, hangs, signals, figures that have gone wrong."""
