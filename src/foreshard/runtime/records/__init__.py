"""What a run writes: sample ledger, metrics, events, traces, and its outcome."""
