"""Long-term budgets: virtual queues, their dual, and the end of the horizon."""
