"""Imported once, before processes are forked: what each would import while it compiles.

Garbage is not looked for among what is here: each process would get copies of all its pages.
"""

import gc

import numpy.testing  # noqa: F401
import onnx.reference  # noqa: F401
import tvm  # noqa: F401

import apq_tvm.codegen.emit
import apq_tvm.codes
import apq_tvm.launches
import apq_tvm.lower
import apq_tvm.manifest
import apq_tvm.module
import apq_tvm.onnx_import.normalise
import apq_tvm.pack
import apq_tvm.quantizers.guided
import apq_tvm.quantizers.stored
import apq_tvm.schedule
import apq_tvm.schedules.cuda.graph
import apq_tvm.schedules.cuda.operators
import apq_tvm.select
import apq_tvm.sessions  # noqa: F401
from apq_tvm.schedules.devices import find_profile, linear_kernels

for target in ("host", "rtx-3090"):
    linear_kernels(find_profile(target))

gc.freeze()
