"""The user's job: a Python file that defines a model, a dataset, a loss and an optimizer.

Decides how user code becomes layers that any rank can build at any time, and samples that any rank can read
by position. In go the four functions of a job file; out come layers, batches and errors that name the user's
file and line. Read `job` first, then `data` (samples) and `layer_builders`; `hf_split` and `hf_tensor` cut
models of transformers.
"""
