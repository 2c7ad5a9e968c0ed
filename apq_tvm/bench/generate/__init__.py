"""Prompts and decoding of language models, beside rivals that take turns, each in a process."""
