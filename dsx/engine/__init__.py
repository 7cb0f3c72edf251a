"""Does it: DeepSpeed's engines under any schedule, with transfers, chunks and ZeRO."""
