"""Presentation: screens of text, HTML reports, the Chrome/Perfetto trace.

In go predictions, plans and outcomes; out come `screen.Screen`s, which ``plain.py`` writes as text and
``terminal.py`` draws with colour, pages (``pages/``) and trace files. Nothing is decided or predicted here.
Read ``screen.py`` first, then ``summary.py``, the screen of a prediction.
"""
