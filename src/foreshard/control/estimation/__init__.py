"""Estimates of speeds, links and costs from measured steps, and detection of change."""
