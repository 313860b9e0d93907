"""What came of every handoff of a soak, and whether both of its sides say the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from soak.deals import Deal, Ended, Worked

_RARE = {"ProtocolError", "OutOfMemory"}


@dataclass
class _Open:
    """A deal, whose sides have not all ended; a side is a role and a member."""

    deal: Deal
    waiting: set[tuple[str, str]] = field(default_factory=set)
    ended: dict[tuple[str, str], Ended] = field(default_factory=dict)
    had_killed: bool = False
    had_suspended: bool = False


class Books:
    """Counts of a whole run."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.lanes: Counter[str] = Counter()
        self.lane_bytes: Counter[str] = Counter()
        self.cancelled_in: Counter[str] = Counter()
        self.disturbed: Counter[str] = Counter()
        self.handoffs = self.quiet_points = self.checked_bytes = self.full = self.most_live = 0
        self.latest_s = self.latest_release_s = 0.0
        self.rare: list[str] = []  # every message of what hardly ever happens
        self.examples: dict[str, str] = {}  # the first message of each error on each side
        self._succeeded: set[int] = set()

    def expect(self, deal: Deal, role: str, member: str) -> None:
        """One side has begun, and has to end once."""
        if deal.number not in self._open:
            self._open[deal.number] = _Open(deal)
            self.handoffs += 1
        self._open[deal.number].waiting.add((role, member))

    def add(self, member: str, worked: Worked) -> None:
        """Take what a member has told of its work.

        Raises
        ------
        AssertionError
            If a side ends that never began or has ended before, or the two sides contradict each other.
        """
        self.checked_bytes += worked.checked_bytes
        self.full += worked.full
        self.most_live = max(self.most_live, worked.most_live)
        for ended in worked.ended:
            self._add_one(member, ended)

    def forget(self, member: str) -> None:
        """The member's process is dead, and its sides with it."""
        for number, found in list(self._open.items()):
            gone = {side for side in found.waiting if side[1] == member}
            found.had_killed |= bool(gone)
            found.waiting -= gone
            if not found.waiting:
                self._close(number)

    def note_suspended(self, member: str) -> None:
        """All that the member offers has ended, and its blocks are used again."""
        for found in self._open.values():
            found.had_suspended |= found.deal.source == member

    def check_roll_call(self, numbers: set[int], *, pairs: int) -> None:
        """Both sides of each of these handoffs have succeeded, with nobody disturbed."""
        missing = numbers - self._succeeded
        assert not missing, f"{len(missing)} of {pairs} undisturbed handoffs have not succeeded: {sorted(missing)}"
        self._succeeded.clear()

    def check_nothing_open(self) -> None:
        """Every side that began has ended."""
        left = {number: sorted(found.waiting) for number, found in self._open.items()}
        assert not left, f"never ended: {left}"

    def _add_one(self, member: str, ended: Ended) -> None:
        found, side = self._open.get(ended.number), (ended.role, member)
        waited_for = found is not None and side in found.waiting
        assert waited_for, f"{member} tells a second end, or one of nothing: {ended}"
        assert not ended.suspect or found.had_suspended, (
            f"{member} finds wrong sums where nothing explains them: {ended}"
        )
        found.waiting.remove(side)
        found.ended[side] = ended
        self.outcomes[ended.role, ended.error or "success"] += 1
        if ended.error is not None:
            self.examples.setdefault(f"{ended.role}: {ended.error}", ended.message)
        if ended.error in _RARE:
            self.rare.append(f"{member}, deal {ended.number}, {ended.role}: {ended.error}: {ended.message}")
        if ended.cancelled_in:
            self.cancelled_in[ended.cancelled_in] += 1
        if ended.role in ("pull", "slot") and ended.error is None:
            self.lanes[ended.lane or "nothing to move"] += 1
            self.lane_bytes[ended.lane or "nothing to move"] += ended.nbytes
        self.latest_s = max(self.latest_s, ended.late_s)
        self.latest_release_s = max(self.latest_release_s, ended.released_after_s)
        if not found.waiting:
            self._close(ended.number)

    def _close(self, number: int) -> None:
        """All that is left of a deal has ended: a source must count every reader that says it has succeeded."""
        found = self._open.pop(number)
        targets = [ended for (role, _), ended in found.ended.items() if role in ("pull", "slot")]
        sources = [ended for (role, _), ended in found.ended.items() if role in ("offer", "push")]
        right = sum(ended.error is None for ended in targets)
        if sources and not found.had_killed and right == len(found.deal.targets):
            assert sources[0].error is None, (
                f"{right} readers have succeeded, and the source says {sources[0]}: {found.deal}"
            )
            self._succeeded.add(number)
