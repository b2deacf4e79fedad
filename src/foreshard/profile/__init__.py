"""Measured tables as cases, their scores, the building of intervals, modules of torch read as models."""
