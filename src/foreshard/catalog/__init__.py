"""Data with sources: devices, instances and prices, models, frameworks by release, fitted constants.

Decides what a name means and what stands for what the user left out. Names, shorthands, TOML files and
Hugging Face configurations go in; `Cluster`, `Device`, `Model`, `Framework` and constants come out, each
with its source and the assumptions made. A new device is an entry of ``data/devices.json``; a new instance,
model or framework one of its file there; a new model architecture is a reader in ``hf/``.
Read ``clusters.py`` first, then ``models.py`` and ``frameworks.py``.
"""
