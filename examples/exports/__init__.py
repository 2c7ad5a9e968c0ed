"""What ``examples/export_models.py`` exports, one module a kind of model."""
