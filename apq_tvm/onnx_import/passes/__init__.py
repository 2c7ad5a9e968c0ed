"""Rewrites of the graph, one file each; `apq_tvm.onnx_import.normalise` says their order."""
