"""jaxkern: GPU training kernels for JAX."""

__version__ = "0.1.0"
