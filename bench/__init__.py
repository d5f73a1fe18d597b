"""Benchmarks of jaxkern: ``python -m bench --help`` tells of all commands."""
