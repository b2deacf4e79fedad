"""What verbs share: parsing of options, their sources, and printing of answers.

``values.py`` has the types of option values, ``request.py`` the options that describe a run, ``sources.py``
environment variables and configuration files, ``answer.py`` the output. Read ``answer.py`` first.
"""
