"""Predict, plan and run distributed DNN training."""

__version__ = "0.1.0"
