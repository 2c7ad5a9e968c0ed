"""The command ``apq-tvm``: one file per command, over the Python API."""
