"""Device profiles, default schedules and search spaces, one file per device family."""
