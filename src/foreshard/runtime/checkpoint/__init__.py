"""Checkpoints keyed by layer: format, folders, and when a rank writes its part."""
