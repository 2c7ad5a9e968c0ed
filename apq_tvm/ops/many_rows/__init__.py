"""Linear layers for many rows of x: panels of decoded weights, used again and again."""
