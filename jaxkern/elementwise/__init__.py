"""Kernels that work element by element: how arrays are cut into units, random bits, the launch.

What the element-wise ops, dropout and the optimizers share.
"""
