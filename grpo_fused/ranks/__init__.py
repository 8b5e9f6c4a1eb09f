"""Calls that several processes share: collectives, the check that all make the same call, and failures."""
