"""What every layer may use: errors, checks, the registry, random streams, progress."""
