"""The same plan in every round, for equal work."""

from collections.abc import Sequence

from .confidence import Calibration
from .plans import Plan
from .reading import ReadingChoice


class FixedSchedule:
    """The same plan in every round.

    Attributes:
        deepest: the most tokens that are drafted.
        reading: all that is drafted is read.
        is_pausing: never.
        compares: never.
        calibration: what was accepted in this call, so that calls are alike.
    """

    is_pausing = compares = looks_back = False

    def __init__(self, plan: Plan) -> None:
        self.plan, self.deepest = plan, plan.depth
        # Nothing is timed.
        self.reading, self.calibration = ReadingChoice(lambda: 0.0, looks=False), Calibration()

    @property
    def chosen(self) -> Plan:
        """The plan, whatever room there is."""
        return self.plan

    def ends_too_soon(self, batch: int, length: int, most: int) -> bool:
        """It drafts."""
        return False

    def leaves_to_plain(self, batch: int, length: int) -> bool:
        """It drafts."""
        return False

    def leaves_rest_to_plain(self) -> bool:
        """It goes on drafting."""
        return False

    def worth_reading_alone(self, probabilities: Sequence[float]) -> int:
        """It drafts wherever there is room."""
        return 0

    def drop_plan(self) -> None:
        """It never does."""

    def note_plain(self, num_rounds: int) -> None:
        """Nothing is learned."""

    def end_call(self, num_steps: int) -> None:
        """Nothing is learned."""

    def next_plan(self, batch: int, room: int, length: int) -> Plan:
        """The plan, as far as there is room for it."""
        return self.plan.within(room)

    def note(
        self,
        outcomes: Sequence[tuple[int, int]],
        of_chains: Sequence[tuple[int, int]] | None = None,
        items: Sequence[int] | None = None,
    ) -> None:
        """Nothing is learned."""

    def end_round(self, is_ordinary: bool, is_unique: bool = False, stands_for: int = 1) -> None:
        """Nothing is measured."""

    def learn(self) -> None:
        """Nothing is learned."""
