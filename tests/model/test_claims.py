"""Claims for names against a model that looks at all of them: in order of arrival, all names together."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.claims import Claims

NAMES = "abcd"
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)


class ClaimsModel(RuleBasedStateMachine):
    """The model: every claim in order of arrival; who has its names is worked out anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: Claims[str, int] = Claims()
        self.wanted: dict[int, set[str]] = {}
        self.having: set[int] = set()
        self.count = 0

    def turn(self) -> list[int]:
        """Who gets its names now, in order of arrival."""
        taken = {name for one in self.having for name in self.wanted[one]}
        found = []
        for one, mine in self.wanted.items():
            if one not in self.having:
                if not mine & taken:
                    found.append(one)
                taken |= mine
        return found

    @rule(mine=names)
    def add(self, mine: list[str]) -> None:
        self.count += 1
        self.wanted[self.count] = set(mine)
        assert self.claims.add(self.count, mine) == (self.turn() == [self.count])
        self.having.update(self.turn())

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.wanted)))
        del self.wanted[gone]
        self.having.discard(gone)
        assert sorted(self.claims.leave(gone)) == self.turn()
        assert self.claims.leave(gone) == []
        self.having.update(self.turn())

    @invariant()
    def agree(self) -> None:
        self.claims.check_invariants()
        assert {one for one in self.wanted if self.claims.has(one)} == self.having
        assert not self.turn()


TestClaimsModel = ClaimsModel.TestCase
TestClaimsModel.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None, database=None
)


def test_nothing_is_kept_of_claims_that_left() -> None:
    claims: Claims[str, int] = Claims()
    for number in range(100):
        claims.add(number, [f"name{number}", "shared"])
    for number in range(100):
        claims.leave(number)
    assert not any(vars(claims).values())
