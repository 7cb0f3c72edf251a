"""What people read: tables of schedules, one line per training step. No effect on training."""
