"""Tensor and sequence parallelism inside a stage: which weights are cut, who computes what."""
