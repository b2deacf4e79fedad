"""Checkpoints that any plan writes and any plan reads, keyed by layer.

Decides when a checkpoint is due, which rank writes which tensors, and when a folder counts as complete. In go
the shards that ranks hold; out comes a folder per step, written through torch's distributed checkpoint with a
JSON index, in which nothing is executed on reading. Read `saving` first (when, what, and restoring), then
`format` (files of one step); `folders` finds the latest step without loading torch.
"""
