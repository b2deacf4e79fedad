"""Plans from measured costs of a user's own model."""
