"""Machine code for 64-bit Arm without hardware: what it executes under qemu, cycles by llvm-mca."""
