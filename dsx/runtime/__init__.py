"""Effects: process groups, transfers, the engine over DeepSpeed, data, tracking."""
