"""The command line. `main.py` imports nothing heavy; verbs import when they run."""
