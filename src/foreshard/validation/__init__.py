"""Measured tables as cases, their predictions, scores and intervals."""
