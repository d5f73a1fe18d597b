"""From a public function to the kernel that runs: checks, derivatives, passes, targets, caches."""
