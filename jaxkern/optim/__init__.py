"""Optimizers that update parameters and state in one pass, as Optax transformations."""
