"""Measurements: programs that time and check, files of results, and the tables and plots made from them."""

import os

# before torch is imported: idle threads that spin would take the time of the call that is measured
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
