"""Networks that make speech: a module takes text, spectra or sound, and returns the loss.

Read ``waveglow.py`` first.
"""
