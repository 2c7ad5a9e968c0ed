"""Operators of ``ai.onnx.ml``, which converters of scikit-learn, XGBoost and LightGBM write."""
