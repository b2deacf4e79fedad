"""The nouns as frozen dataclasses: model, device, cluster, plan, prediction, scenario, events and commands.

Decides what is valid, and nothing else: no file of data, no time. Untrusted TOML and JSON go in through
``codec.py``; checked objects come out, or a `SpecError` that names file, key, value, rule and fix. Rules
that join a plan with its model and cluster are in ``checks.py``. Read ``plan.py`` first, then
``model.py`` and ``cluster.py``.
"""
