"""A module's graph: read from Relax, kept as plain data, printed as C."""
