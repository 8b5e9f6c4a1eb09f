"""Calls as values: their options, layouts, tensors and results, and the checks before any work."""
