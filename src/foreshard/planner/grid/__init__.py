"""The exhaustive search on equal nodes: every plan that degree flags span, with bounds."""
