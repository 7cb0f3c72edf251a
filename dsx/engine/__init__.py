"""Runs the steps: DeepSpeed's engines under any schedule, with transfers, chunks and ZeRO."""
