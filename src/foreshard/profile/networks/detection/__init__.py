"""Networks that find objects: a module takes images and what is to be found, and returns the loss.

Read ``ssd.py`` first.
"""
