"""One typed configuration from file, environment and flags."""
