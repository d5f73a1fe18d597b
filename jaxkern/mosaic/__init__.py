"""The vocabulary of kernels: lanes, units, clusters, instructions. All that is written in MLIR."""
