"""The interaction between spherical shells, and the choice of sum for a grid."""

import numpy as np

from coulomb._support.errors import ParameterError
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.theory.averages import cell_averages, check_continuum
from coulomb.theory.convolution import AbstractGridSum, ConvolutionSum
from coulomb.theory.curved import RadialBall
from coulomb.theory.grids import AbstractBoxGrid, AbstractGrid, FloatArray


class ShellSum(AbstractGridSum):
    """Sums over shells of the 3-ball.

    The mean of `g_s` between spheres of radii `a` and `b` is
    `((a + b)^(2-s) - |a - b|^(2-s)) / (2 a b (2 - s))` for `s > 0`; at `s = 1` that is
    Newton's `1 / max(a, b)`. The second term is averaged over both shells, so that it
    is finite up to `s < 3`.

    Examples
    --------
    >>> pairs = ShellSum(Riesz(s=1), RadialBall(1.0, 50))
    >>> masses = np.zeros(50)
    >>> masses[10] = 1.0
    >>> bool(abs(pairs(masses)[40] - 1 / RadialBall(1.0, 50).centres[40, 0]) < 1e-12)
    True
    """

    def __init__(self, interaction: AbstractInteraction, grid: RadialBall) -> None:
        check_continuum(interaction, grid.dim)
        if not isinstance(interaction, Riesz) or interaction.truncation:
            raise ParameterError(
                "`interaction` must be Riesz without truncation on a RadialBall; got "
                f"{interaction!r}."
            )
        radii = grid.centres[:, 0]
        total = radii[:, None] + radii
        product = 2 * radii[:, None] * radii
        gap = np.abs(radii[:, None] - radii)
        s = interaction.s
        if s <= 0:  # the integral of g(r) r is smooth
            self._matrix = (_moment(total, s) - _moment(gap, s)) / product
            return
        width = (grid.radius / grid.cells,)
        inner = Riesz(s=s - 2)
        table = cell_averages(inner, (grid.cells,), width)
        index = np.arange(grid.cells)
        near = table[np.abs(index[:, None] - index)]
        if s == 2:
            self._matrix = (np.log(total) + near) / product
        elif s < 2:
            self._matrix = (total ** (2 - s) + near) / (product * (2 - s))
        else:
            self._matrix = (near - total ** (2 - s)) / (product * (s - 2))

    def __call__(self, masses: FloatArray) -> FloatArray:
        return np.asarray(self._matrix @ masses)

    @property
    def local(self) -> float:
        steps = np.diag(self._matrix)[1:] - np.diag(self._matrix, 1)
        return max(float(np.median(steps)), 0.0)

    def dense(self) -> FloatArray:
        return np.asarray(self._matrix)


def _moment(r: FloatArray, s: float) -> FloatArray:
    """Integrate `g_s(r) r` from zero, for `s <= 0`."""
    if s < 0:
        return np.asarray(-(r ** (2 - s)) / (2 - s))
    safe = np.where(r > 0, r, 1.0)
    return np.asarray(0.25 * r**2 - 0.5 * r**2 * np.log(safe))


def grid_sum(interaction: AbstractInteraction, grid: AbstractGrid) -> AbstractGridSum:
    """Choose the sum over pairs of cells that fits a grid."""
    if isinstance(grid, AbstractBoxGrid):
        return ConvolutionSum(interaction, grid)
    if isinstance(grid, RadialBall):
        return ShellSum(interaction, grid)
    raise ParameterError(f"`grid` must be a box, a disc or a ball; got {grid!r}.")
