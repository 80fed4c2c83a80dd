"""What is known of an object goes with it."""

from __future__ import annotations

from weft.ir.remembered import while_it_lives


class Key:
    pass


def test_computed_once_for_each_object() -> None:
    calls: list[Key] = []

    @while_it_lives
    def number(key: Key) -> int:
        calls.append(key)
        return len(calls)

    one, other = Key(), Key()
    assert (number(one), number(other), number(one)) == (1, 2, 1) and calls == [one, other]
    assert number.__name__ == "number"
