"""Meanings of one span of a row: few rows of x, and codes that most steps never unpack."""
