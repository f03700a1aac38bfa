"""Sessions without a parent, as the tests of the loops have them."""

from tests.loops.conftest import make_session

__all__ = ["make_session"]
