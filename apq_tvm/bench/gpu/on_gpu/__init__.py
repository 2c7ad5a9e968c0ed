"""What ``apq-tvm bench gpu --prepare`` puts into a bundle, and a machine with a GPU runs.

numpy and the standard library are all it imports, the driver and torch where they are there.
"""
