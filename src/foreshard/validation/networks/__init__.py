"""Published training speeds of networks, predicted as traced modules: one case for each row of a table.

Read ``cases.py`` first. ``tables.py`` says which run a row states, ``recipes.py`` what the commands of its
benchmark say beyond it, ``plausible.py`` which rows contradict each other, ``predicted.py`` predicts them.
"""
