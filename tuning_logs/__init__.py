"""Tuning logs: one folder per device."""
