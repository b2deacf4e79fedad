"""Search for the best plan, with a proof of how far it can be from the best possible."""
