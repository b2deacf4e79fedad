"""From model and cluster to the abstract problem of stages with prices, and back to ranks.

Decides what a stage of some layers on some devices takes and whether it fits in their memory. A model, a
cluster and options go in; seconds, and how many micro-batches fit, by type of stage come out, and for a
solution the `Plan` on ranks with its step time by the engine. Read ``stage_prices.py`` first, then
``mapping.py``.
"""
