import json

import numpy as np

from coulomb.experiments.synthetic import record_frames


def test_films_fit_the_page_and_repeat_themselves():
    films = record_frames(8, steps=(40, 20))
    assert films == record_frames(8, steps=(40, 20))
    assert json.loads(json.dumps(films, allow_nan=False)) == films
    assert [run["constants"] for run in films["runs"]] == ["paper", "default"]
    for run in films["runs"]:
        positions = np.array(run["positions"])
        frames, particles, dim = positions.shape
        assert frames <= 300
        assert particles <= 300
        assert dim == 2
        assert (
            len(run["steps"]) == len(run["energy"]) == len(run["alignment"]) == frames
        )
        assert run["steps"] == sorted(set(run["steps"]))
        for kernel in run["kernels"]:
            values = np.array(kernel["values"])
            assert values.shape == (48, 48)
            assert np.allclose(values, values.T)
            assert np.allclose(np.diag(values), 1)
    paper = films["runs"][0]
    norms = np.linalg.norm(np.array(paper["positions"]), axis=-1)
    assert norms.max() <= paper["radius"] + 0.01  # rounded for the page
    ours = films["runs"][1]
    assert ours["alignment"][-1] > ours["alignment"][0]


def test_a_film_is_one_run_whatever_is_shown_of_it():
    """More frames show more of the same run: its first and last frame stay."""
    few, many = (record_frames(n, steps=(30, 10))["runs"][0] for n in (3, 12))
    assert few["positions"][0] == many["positions"][0]
    assert few["positions"][-1] == many["positions"][-1]
