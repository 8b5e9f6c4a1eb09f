"""Recipes that train a small language model on a CPU in a minute: format, length, countdown, mixed rewards."""

import os

# Must be set before torch is imported; see examples/arithmetic.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
