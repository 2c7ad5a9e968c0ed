"""Unscheduled TensorIR of each operation family, written once, target-neutral."""
