"""What people look at: screens of text, the HTML report, the trace; and the requests they start from."""
