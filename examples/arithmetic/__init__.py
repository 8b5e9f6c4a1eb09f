"""A complete GRPO run on arithmetic that fits in two CPU cores and a few minutes."""

import os

# Must be set before torch is imported. The model is so small that its threads often wait for each other. By default
# they spin, and one other busy process on the machine then makes the run twenty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
