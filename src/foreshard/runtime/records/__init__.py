"""The files a run writes, and the outcome read back from them.

Decides what is written when, what happens while the disk is full, and which steps and samples count. In go
committed steps and events; out come metrics.jsonl, events.jsonl, a ledger of trained samples per rank,
traces, and the outcome of a run. Read `ledger` first (which samples were trained), then `metrics`; both write
through `durable_jsonl`.
"""
