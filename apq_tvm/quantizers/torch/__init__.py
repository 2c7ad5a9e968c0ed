"""The normalised graph and every decoder in torch, for gradients."""
