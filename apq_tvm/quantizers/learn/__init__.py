"""Learning codes and scales in torch, block by block and end to end."""
