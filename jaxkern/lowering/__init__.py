"""Kernels lowered once a process and once a machine, for the GPU of the program that calls them."""
