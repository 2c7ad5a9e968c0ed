"""Files that are copied or filled in to make a compiled module."""
