"""Networks that rank items for users: mostly tables, of which a sample reads a row each. Read `ncf` first."""
