"""HTML reports, each one file that loads nothing.

One module per report (prediction, plan, simulation) returns the page as text; ``markup.py`` has what they
share, ``plan_drawing.py`` and ``line_chart.py`` draw SVG. Templates, style and script lie in ``static/``.
Read ``prediction_page.py`` first.
"""
