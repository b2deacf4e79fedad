"""Networks that find objects: a module takes images and targets, and returns the loss."""
