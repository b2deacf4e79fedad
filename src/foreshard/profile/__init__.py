"""Measures a job on this machine and fits costs to what was measured.

Decides how layers and links are timed and which lines are fitted to the times. A job (layers, samples,
loss, optimizer) goes in; a profile (seconds and bytes of every layer, seconds of messages and sums) comes
out, and from profiles the costs file that ``predict --costs`` and ``plan --costs`` take. Read
``record.py`` first, then ``timed_chain.py`` for one pass and ``calibration.py`` for the fit.
"""
