"""Programs for a machine: what runs on it (`doctor`), and whether that is right (`check`)."""
