"""Data with sources: devices, clusters, models, frameworks by release, fitted constants."""
