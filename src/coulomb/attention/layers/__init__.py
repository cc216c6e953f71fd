"""Attention layers: linear with learned features, and what it is compared with."""
