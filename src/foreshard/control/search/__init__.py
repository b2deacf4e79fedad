"""The best structure in one slot: candidates, cuts, shares, prices, and what is cached between slots."""
