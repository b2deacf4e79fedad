"""Networks that find the class of every position: a module takes volumes and classes, returns the loss."""
