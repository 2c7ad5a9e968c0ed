"""Linear layers on any instruction set: the record of a kernel, its checks, shared schedules."""
