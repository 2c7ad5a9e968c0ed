"""Candidates judged without a device: what their code executes, and what that should cost."""
