"""Names that are replaced for a while."""

from __future__ import annotations

from contextlib import suppress

import pytest

from lowvram.compat.replaced import replaced


class Base:
    @property
    def size(self) -> int:
        return 1


class Derived(Base): ...


@pytest.mark.parametrize("owner", [Base, Derived])
def test_a_name_is_afterwards_what_it_was(owner: type[Base]) -> None:
    own = dict(vars(owner))
    with suppress(ZeroDivisionError), replaced(owner, "size", 2):
        assert owner().size == 2
        raise ZeroDivisionError
    assert owner().size == 1
    assert dict(vars(owner)) == own
