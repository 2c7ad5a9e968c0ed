"""Functions of floats, and roundings of windows, as tasks of the tuner."""
