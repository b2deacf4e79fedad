"""What the cluster is like, from what steps measured.

Measured speeds, transfers and prices go in, a `State` comes out: robust averages with change detection
(`estimates`), and which numbers are believed at all (`plausibility`). Read `estimates` first.
"""
