"""Programs about a machine: what runs on it (`doctor`), and whether its results are right (`check`)."""
