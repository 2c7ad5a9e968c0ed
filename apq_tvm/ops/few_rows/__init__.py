"""Linear layers for few rows of x: the weights are streamed through once."""
