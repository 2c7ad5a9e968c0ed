"""The folder of a compiled module: its files, its weights, moved into place whole."""
