"""What the cluster is like, from what steps measured.

Measured speeds, transfers and prices go in, a `State` comes out: robust averages with change detection
(`estimates`), which numbers are believed at all (`plausibility`), and whether anything has changed since
the running plan was chosen (`frames`). Read `estimates` first.
"""
