"""Engine connectors: one folder per engine, each only names blocks, asks, copies and tells."""
