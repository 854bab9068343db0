"""The drafters, one configuration and one modeling file each. Hub-safe: flat, and imports only siblings."""
