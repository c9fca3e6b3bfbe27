"""Reports: consumers of the engine's events."""
