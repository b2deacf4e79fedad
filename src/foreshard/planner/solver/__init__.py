"""The abstract problem of mixed clusters: priced stages, column generation, bounds, integer steps."""
