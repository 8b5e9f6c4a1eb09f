"""The public functions: they document, validate and dispatch."""
