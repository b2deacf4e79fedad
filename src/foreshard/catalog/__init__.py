"""Data with sources: devices, instances and prices, models, frameworks by release, fitted constants.

Decides what a name means, and the defaults for what the user left out. Names, shorthands, TOML files and
Hugging Face configurations go in; `Cluster`, `Device`, `Model`, `Framework` and constants come out, each with
its source and the assumptions made. A new device is a row of ``scripts/make_device_catalog.py``, which writes
``data/devices.json``; a new instance is an entry of ``data/instances.json``, a model of ``data/models.json``,
a framework of ``data/frameworks.toml``; a new model architecture is a reader in ``hf/``. Read ``clusters.py``
first, then ``models.py`` and ``frameworks.py``.
"""
