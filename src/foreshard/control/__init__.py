"""The online controller: the best plan now, the budget in the long run, while everything changes."""
