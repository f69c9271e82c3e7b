"""How a module is parallelised: one file each."""
