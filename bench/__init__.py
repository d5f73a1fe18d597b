"""Benchmarks of jaxkern: ``python -m bench --help``."""
