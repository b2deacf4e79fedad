"""Parsing of options and printing of answers, shared by the verbs."""
