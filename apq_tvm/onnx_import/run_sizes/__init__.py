"""Operators whose output sizes only a run knows: their sizes become symbols (``apq.Sizes``)."""
