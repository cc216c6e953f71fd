"""The paper's encoder, on padded and on packed sequences."""
