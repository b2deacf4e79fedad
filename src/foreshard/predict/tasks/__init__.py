"""Cost source `formula`: seconds of every single task of a rank."""
