"""Fuzzers: ``python -m tests.fuzz TARGET SECONDS``, or ``make fuzz FUZZ_SECONDS=1800``."""
