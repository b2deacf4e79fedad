"""Checkpoints that any plan writes and any plan reads, keyed by layer.

Decides when a checkpoint is due, which rank writes which tensors, and when a folder counts as complete. In go
the shards that ranks hold; out comes a folder per step, with a safetensors file per rank and its checksum.
Read `saving` first (when, what, and restoring), then `format` (files of one step) and `other_formats` (files
for other programs); `folders` finds the latest step without loading torch.
"""
