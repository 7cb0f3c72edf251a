"""What a run takes: memory before it runs, byte by byte."""
