"""Other libraries' programs on our kernels: `integrations.trl`, `integrations.liger`."""
