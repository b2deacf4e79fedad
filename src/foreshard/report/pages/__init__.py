"""The one-file HTML reports."""
