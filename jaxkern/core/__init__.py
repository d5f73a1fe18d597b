"""Passes from a public function to its kernel: checks, derivatives, targets, caches."""
