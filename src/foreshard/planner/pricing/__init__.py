"""From model and cluster to the abstract problem and back: stage times, memory, ranks."""
