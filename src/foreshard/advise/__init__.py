"""Requests and changes to them: what would help, what fits, what other hardware would gain."""
