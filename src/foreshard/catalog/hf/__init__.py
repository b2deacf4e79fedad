"""Readers of Hugging Face configurations, one file per family of architectures.

Decides which transformer a ``config.json`` describes. A configuration goes in; a `Model` comes out whose
number of parameters equals that of transformers. A new architecture is a function that takes a `Reader` and
an entry of ``FAMILIES`` in ``load.py``; to train models of it, one in ``runtime/job/hf_split.py`` too. Read
``load.py`` first, then ``decoders.py``.
"""
