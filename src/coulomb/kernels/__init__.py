"""The compiled hot loops, each beside its plain twin.

Everything here works on numpy arrays and is optional: without numba the callers use
the plain torch form of the same formula. Ask `available()` first.
"""

from coulomb.kernels.runtime import available

__all__ = ["available"]
