"""TensorIntrin pairs: a plain-loop meaning and the instruction, one file per family."""
