"""Schedules of what is no linear layer, and the loop rewrites they are made of."""
