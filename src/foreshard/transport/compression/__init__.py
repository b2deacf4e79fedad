"""Sums of gradients of which only a part goes over the network: low rank, largest entries, signs, 8 bits.

Decides what of a gradient ranks exchange and what they keep for the next step (error feedback). In goes a
flat gradient with the shapes in it, out comes an approximate sum, the same on all ranks. Read
``compressor.py`` first, then ``low_rank.py``, the best method where links are slow.
"""
