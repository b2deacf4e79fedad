"""Cost source `measured`: layers and links timed on machines of the user."""
