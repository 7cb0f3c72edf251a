"""What a run takes: memory before it runs, byte by byte and without torch, and the engine on paper."""
