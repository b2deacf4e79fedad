"""Executes one training step on one rank: its schedule, exchange, gradient sync, update, vote."""
