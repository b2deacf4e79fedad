"""The search on devices of several kinds."""
