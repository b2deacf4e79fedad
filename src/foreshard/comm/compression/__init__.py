"""What compression of gradients costs and saves: bytes on the wire, time, and the bandwidth where it pays.

Decides nothing about how gradients are compressed (``transport/compression``). In goes a method with the
shapes of a bucket, out come bytes, seconds and the bandwidth below which it is faster. Read ``methods.py``
first, then ``cost.py``.
"""
