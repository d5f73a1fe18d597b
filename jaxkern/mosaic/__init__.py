"""The vocabulary of kernels: launch, lanes, registers, instructions, and the ring of stages."""
