def test_without_whole_params() -> None:
    pass
