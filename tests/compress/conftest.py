"""Sessions without a parent, as for loops."""

from tests.loops.conftest import make_session as make_session
