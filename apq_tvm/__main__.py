"""``python -m apq_tvm``: the command ``apq-tvm``, where no script of it is on the path."""

from apq_tvm.cli.main import main

main()
