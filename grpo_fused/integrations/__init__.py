"""Other libraries' programs on our kernels: `integrations.trl`, `integrations.verl`, `integrations.liger`."""
