"""Imported once, before processes are forked.

Garbage is not looked for among what is here: each process would get copies of all its pages.
"""

import gc

import onnx.reference  # noqa: F401
import tvm  # noqa: F401

import apq_tvm.codegen.emit
import apq_tvm.lower
import apq_tvm.onnx_import.normalise
import apq_tvm.schedule
import apq_tvm.select  # noqa: F401

gc.freeze()
