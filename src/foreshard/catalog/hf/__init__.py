"""Readers of Hugging Face configurations.

Decides which transformer a ``config.json`` describes. A configuration goes in; a `Model` comes out whose
number of parameters equals that of transformers. A new decoder is an entry of ``data/architectures.toml``;
what follows from several keys is a rule in ``decoders.py``. Another kind of model is a function that takes a
`Reader` and an entry of ``FAMILIES`` in ``load.py``. Models that are also trained need an entry in
``runtime/job/hf_split.py``, and in ``hf_tensor.py`` to be cut by tp. Read ``load.py`` first, then
``decoders.py``.
"""
