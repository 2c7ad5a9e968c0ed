"""C sources of the runtime that is compiled into every module (package data, not Python)."""
