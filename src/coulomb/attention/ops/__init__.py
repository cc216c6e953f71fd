"""Attention as pure functions: one interface, several ways to compute it."""
