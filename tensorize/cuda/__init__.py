"""Instructions of NVIDIA GPUs: device functions with two bodies, PTX and what it means."""
