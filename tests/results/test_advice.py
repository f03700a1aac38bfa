"""Advice after a run that waited for its data."""

from lowvram.results.advice import data_wait_advice


def test_waiting_for_data():
    expected = "23 % of the time was spent waiting for data: try loader=workers"
    assert data_wait_advice(0.234, {"loader": "inline"}) == expected
    of_iterable = data_wait_advice(0.234, {"loader": "inline", "data": "external"})
    assert of_iterable == f"{expected} (loader.num_workers=1 for an iterable dataset)"
    assert data_wait_advice(0.234, {"loader": "workers"}) is None
    assert data_wait_advice(0.1, {"loader": "inline"}) is None
    assert data_wait_advice(None, {"loader": "inline"}) is None
