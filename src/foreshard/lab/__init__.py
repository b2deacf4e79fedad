"""A mixed cluster on one machine: its ranks, links and changes, its enforced network, its simulation."""
