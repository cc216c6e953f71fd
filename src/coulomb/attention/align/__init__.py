"""Phase A: labels move the particles of a model."""
