"""Networks that find the class of every position: a module takes volumes and classes, and returns the loss.

Read ``unet3d.py`` first.
"""
