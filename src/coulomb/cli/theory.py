"""`coulomb meanfield` and `coulomb deviations`: the continuum of a typed potential."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from coulomb._support.checks import check_member
from coulomb._support.progress import progress_bar
from coulomb.cli import output

if TYPE_CHECKING:
    from coulomb.theory.grids import AbstractGrid


PotentialText = Annotated[str, Argument(help="V, a formula in x (and y).")]
DomainName = Literal["interval", "square", "disc"]
Domain = Annotated[DomainName, Option(help="The domain.")]
Size = Annotated[float, Option(min=1e-6, help="Half its side, or its radius.")]
Cells = Annotated[int, Option(min=4, help="Cells along a side (even for a disc).")]
Exponent = Annotated[float, Option("--s", help="s of the repulsion; 0: logarithm.")]
Truncation = Annotated[float, Option(min=0, help="Distances below it count as it.")]
Strength = Annotated[float, Option(min=0, help="lambda, of the repulsion.")]
Picture = Annotated[Path | None, Option("--figure", help="Draw it to this file.")]
Observable = Annotated[
    str, Option(help="f; cos(x) is the kernel K(1, 0) of Fourier features.")
]
Counts = Annotated[str, Option(help="Numbers of particles, at least three.")]


def meanfield(
    potential: PotentialText = "2*x**2",
    domain: Domain = "interval",
    size: Size = 1.0,
    cells: Cells = 200,
    s: Exponent = 0.0,
    truncation: Truncation = 0.0,
    strength: Strength = 1.0,
    beta: float = Option(2.0, help="Inverse temperature, or inf."),
    start: str = Option(
        "exp(-10*(x-0.4)**2)", help="The first density, a formula; it is normalised."
    ),
    time: float = Option(0.3, help="When particles are compared."),
    counts: Counts = "16,32,64,128,256",
    replicas: int = Option(16, min=2, help="Runs for each number."),
    step_size: float = Option(2e-3, help="eta of the particles."),
    clip: float = Option(50.0, help="Largest drift of a particle."),
    boundary: Literal["reflect", "project"] = Option(
        "reflect", help="Particles at the wall."
    ),
    observable: Observable = "cos(x)",
    seed: output.Seed = 0,
    figure: Picture = None,
    json: output.Json = None,
) -> None:
    """Watch particles meet their continuum limit.

    Solves the McKean-Vlasov equation for the potential you type, finds its equilibrium,
    and runs Langevin particles against it: the distance falls as a power of their
    number, which is fitted.

    **Examples**

    `coulomb meanfield "2*x**2" --figure meanfield.png`

    `coulomb meanfield "cos(3*x)" --s 0.5 --truncation 0.1 --beta 10 --json out.json`

    `coulomb meanfield "x**2 + y**2" --domain disc --cells 48 --start "exp(-9*r**2)"`
    """
    import numpy as np
    import torch

    from coulomb import theory
    from coulomb._support.checks import make_generator
    from coulomb.interactions import Riesz

    _check_outputs(figure, json)
    grid, repulsion = _grid(domain, size, cells), Riesz(s=s, truncation=truncation)
    felt, seen, begun = (
        theory.parse_expression(formula, grid.dim)
        for formula in (potential, observable, start)
    )
    system = theory.MeanField(grid, felt, repulsion, strength, beta)
    numbers = output.whole_numbers("counts", counts)
    first = begun(torch.from_numpy(grid.points)).numpy()
    settings = theory.GapSettings(
        step_size, boundary=boundary, replicas=replicas, clip=clip
    )
    marks = time * np.array([0.1, 0.3, 1.0])
    with progress_bar("mean field", len(numbers) + 2) as advance:
        rest = theory.equilibrium(system)
        advance(note="equilibrium")
        flow = theory.evolve(system, first, marks)
        advance(note="density")
        gap = theory.mean_field_gap(
            system,
            first,
            time,
            numbers,
            seen,
            settings=settings,
            generator=make_generator(seed),
            watch=lambda count: advance(note=f"{count} particles"),
        )
    energies = np.interp(flow.times, flow.step_times, flow.free_energies)
    distances = np.abs(flow.densities - rest.density) @ grid.volumes
    _print_columns(
        f"Density, V = {potential}, equilibrium free energy {rest.free_energy:.6g}",
        ["time", "free energy", "L1 distance from equilibrium"],
        *(flow.times, energies, distances),
    )
    shown = {"N": gap.counts, "observable, r.m.s. error": gap.observable}
    if gap.first_exponent is not None:
        shown |= {"W1": gap.first, "W2": gap.second}
    title = f"Particles at time {time:g}, mean of {replicas} runs"
    _print_columns(title, list(shown), *shown.values())
    fits = {
        "W1": gap.first_exponent,
        "W2": gap.second_exponent,
        "observable": gap.observable_exponent,
    }
    for name, fit in fits.items():
        if fit is not None:
            output.say(
                f"{name} falls as N^{fit.slope:.3f} "
                f"(95 % interval {fit.low:.3f} to {fit.high:.3f})"
            )
    found = {"points": grid.points, "equilibrium": rest, "flow": flow, "gap": gap}
    _write("meanfield", found, figure, json)


def deviations(
    potential: PotentialText = "x**2",
    domain: Domain = "interval",
    size: Size = 3.0,
    cells: Cells = 300,
    s: Exponent = 0.0,
    truncation: Truncation = 0.0,
    strength: Strength = 0.5,
    beta: float = Option(1.0, help="beta_N = beta N^power, the factor of the energy."),
    power: float = Option(1.0, min=1, help="1 for speed N, above for speed beta_N."),
    observable: Observable = "cos(x)",
    delta: float = Option(0.25, help="The deviation."),
    counts: Counts = "8,16,32,64",
    configurations: int = Option(4000, min=10, help="Draws for each estimate."),
    bridges: int = Option(0, min=0, help="Annealing steps; cold systems need some."),
    seed: output.Seed = 0,
    figure: Picture = None,
    json: output.Json = None,
) -> None:
    """Measure how fast deviations of the learned kernel become rare.

    Estimates P(|int f dmu_N - centre| >= delta) under the Gibbs law by importance
    sampling, down to any size, and compares its decay with the rate of the large
    deviation principle; and -log Z_N / beta_N with its variational limit.

    **Examples**

    `coulomb deviations "x**2" --observable "cos(x)" --delta 0.25 --figure rare.png`

    `coulomb deviations "x**2" --observable x --delta 0.5 --power 2 --bridges 6
    --counts 2,3,4,5 --strength 0.2`
    """
    from coulomb import theory
    from coulomb._support.checks import make_generator
    from coulomb.interactions import Riesz

    _check_outputs(figure, json)
    grid, repulsion = _grid(domain, size, cells), Riesz(s=s, truncation=truncation)
    felt = theory.parse_expression(potential, grid.dim)
    seen = theory.parse_expression(observable, grid.dim)
    system = theory.MeanField(grid, felt, repulsion, strength, 1.0)
    numbers = output.whole_numbers("counts", counts)
    run: Any = {"scaling": theory.Scaling(beta, power=power)}
    run["settings"] = theory.ImportanceSettings(configurations, bridges=bridges)
    with progress_bar("large deviations", 2 * len(numbers)) as advance:
        run["watch"] = lambda count: advance(note=f"{count} particles")
        curve = theory.deviation_curve(
            system, seen, delta, numbers, generator=make_generator(seed, 0), **run
        )
        energy = theory.free_energy_curve(
            system, numbers, generator=make_generator(seed, 1), **run
        )
    speed = "N" if power == 1 else "beta_N"
    _print_columns(
        f"P(|int f dmu_N - {curve.centre:.4f}| >= {delta:g}), f = {observable}",
        ["N", speed, "log P", "standard error", "predicted", "weights' size"],
        *(curve.counts, curve.speeds, curve.log_probabilities, curve.standard_errors),
        *(curve.predictions, curve.effective_sizes),
    )
    output.say(
        f"-log P grows with {speed} at {curve.fit.slope:.4f} "
        f"+- {curve.fit.standard_error:.4f}; predicted {curve.rate:.4f}"
    )
    _print_columns(
        f"-log Z_N / beta_N; its limit is {energy.limit:.6g}",
        ["N", "measured", "standard error", "mean field at beta_N / N"],
        *(energy.counts, energy.values, energy.standard_errors, energy.finite_limits),
    )
    found = {"deviations": curve, "free_energy": energy}
    _write("deviations", found, figure, json)


def _check_outputs(figure: Path | None, json: Path | None) -> None:
    output.check_outputs(figure, json)
    if figure is not None:
        check_member("figure", figure.suffix.lower(), (".pdf", ".png", ".svg"))


def _grid(domain: DomainName, size: float, cells: int) -> "AbstractGrid":
    from coulomb.theory import Disc, Interval, Rectangle

    if domain == "interval":
        return Interval(-size, size, cells)
    if domain == "square":
        return Rectangle((-size, -size), (size, size), (cells, cells))
    return Disc(size, cells)


def _print_columns(title: str, headers: list[str], *columns: Any) -> None:
    rows = zip(*columns, strict=True)
    shown = ([f"{value:.5g}" for value in row] for row in rows)
    output.print_table(title, headers, shown, words=0)


def _write(
    name: str, found: dict[str, Any], figure: Path | None, json: Path | None
) -> None:
    """Draw and write what was found, as far as it was asked for."""
    from coulomb._support.archive import plain

    numbers = plain(found)
    if figure is not None:
        from coulomb.report.print import print_side_by_side
        from coulomb.report.sections.theory import theory_charts

        print_side_by_side(theory_charts(name, name, numbers), figure)
        output.say(f"Picture: {figure}")
    output.write_numbers(json, numbers)
