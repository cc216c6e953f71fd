"""`python -m coulomb`: the command line, as `torchrun -m coulomb` starts it."""

from coulomb.cli import run_command

if __name__ == "__main__":
    run_command()
