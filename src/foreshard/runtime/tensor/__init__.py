"""Tensor and sequence parallelism inside a pipeline stage.

Decides which weights of a layer are cut over the ranks of a stage, what each rank computes, and where their
results are summed or gathered. In go a layer and its tensor plan (roles by module name); out comes the layer
with some modules replaced by cut ones, which communicate through DTensors. Read `split` first (roles and cut
modules), then `ranks` (the mesh and its collectives); `sequence` and `draws` handle sequences and dropout.
"""
