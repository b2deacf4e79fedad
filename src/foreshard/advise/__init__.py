"""Advice on one run: what was asked, and which change would improve it.

Decides which single changes win time, which nearest change fits memory, what other hardware would gain, and
how group shares should be split. In goes a `request.Request` (model, cluster, and degrees or a plan); out
come predictions and `change.Effect`s. Nothing is formatted here. Read ``request.py`` first, then
``change.py``.
"""
