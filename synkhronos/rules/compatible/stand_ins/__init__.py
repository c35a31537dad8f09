"""Stand-ins for modules that model files import, where the real ones are missing or need a GPU."""
