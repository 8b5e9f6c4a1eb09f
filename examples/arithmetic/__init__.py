"""A complete GRPO run on arithmetic that fits in two CPU cores and a few minutes."""

import os

# Must be set before torch is imported. The model is so small that its threads wait for each other all the time; by
# default they spin, and one other busy process on the machine then slows the run down twentyfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
