"""The choice of each round's plan: the most tokens per second, by what rounds have cost and what was accepted.

Pure but for the clock, which is passed in.
"""

from collections.abc import Callable, Sequence

from .beginnings import Beginnings
from .checks import TextChecks
from .costs import Costs
from .knowledge import Knowledge, RoundOutcome
from .plans import NOTHING, Plan
from .reading import ReadingChoice
from .rounds import LONG_ROUND, CompiledRounds, UncompiledRounds
from .tries import Tries
from .worth import PlanWorth


class Schedule:
    """Chooses a plan for each round of a call.

    What a plan is worth is known from tokens (what was accepted of such drafts) over cost. The best plan is followed, except
    that others are tried now and then, as long as the knowledge's purse pays for what that may lose: a drafter that is never
    right then costs little, and one that comes to know a text is found out.

    Args:
        knowledge: of earlier calls; it grows.
        plans: what to choose from, the largest last.
        first: the plan to begin with where nothing is known.
        clock: tells seconds.
        looks: whether drafts are looked at, to read what is worth it of them.
        compares: whether the chain that a tree took the place of is known for nothing.
        reads_again: whether the target reads the accepted part of a draft again if some was rejected, and writes one token more.
        is_compiled: whether rounds are compiled, see [`CompiledRounds`].

    Attributes:
        reading: what is read of drafts.
        deepest: the most tokens that are drafted.
        chosen: the plan of this round if there were room for all of it.
        is_pausing: whether nothing is drafted now because that is best, and not for want of room.
        is_sure: whether drafts clearly pay, and plans were compared often enough: then little is tried.
        calibration: what was accepted of other drafts, see [`Calibration`].
    """

    # Rounds before the choice is thought over.
    HELD = 16
    # Rounds like those before from which is learned at once: eight times one takes the interpreter far longer than once eight.
    AT_ONCE = 8
    # The same where rounds are long, or of one item that may soon be left to plain `generate`.
    FEW_AT_ONCE = 4
    # Share of a batch's rounds with drafts, at least, in calls that tell what these bring.
    MOSTLY_DRAFTED = 0.75
    # Plain `generate` is left alone with what drafts are too slow for if they were judged by so many.
    JUDGED = 3
    # Rounds with drafts, in the call of a batch, before its rest is left, if whole calls with drafts were no slower: else one
    # hard text would decide for all that come after it.
    FAIR_TRIAL = 8
    # Calls left to plain `generate`, wholly or in part, that are looked at again, see [`looks_back`]; and later one of so many.
    FIRST_LOOKS_BACK, LOOKS_BACK = 6, 5
    # How much faster rounds without a draft, which teach nothing of drafts, have to be where these paid in earlier texts.
    LEAD_WHERE_DRAFTS_PAID = 1.1
    # How much faster than the best plan one has to seem that would have to be compiled. Where rounds are long that takes minutes:
    # there it is left.
    WORTH_COMPILING = 1.1

    def __init__(
        self,
        knowledge: Knowledge,
        plans: list[Plan],
        first: Plan,
        clock: Callable[[], float],
        looks: bool = False,
        compares: bool = False,
        reads_again: bool = False,
        is_compiled: bool = False,
    ) -> None:
        self.knowledge, self.plans, self.first, self.clock = knowledge, plans, first, clock
        knowledge.begin_text()
        self.reading, self.calibration = ReadingChoice(clock, looks), knowledge.calibration
        self.compares, self.deepest, self.worth = compares, plans[-1].depth, PlanWorth(knowledge, plans, reads_again)
        self.rounds = (CompiledRounds if is_compiled else UncompiledRounds)(plans, first)
        knowledge.forget_costs(self.rounds.are_young)
        self.checks = TextChecks(knowledge.savings, self.worth, first)
        self.tries = Tries(knowledge, self.worth, self.rounds, self.checks, plans, first)
        # The last round's plan, and for how many rounds it was followed or tried.
        self.last, self.in_a_row = NOTHING, 0
        self.num_rounds, self.reconsidered, self.num_surprises, self.batch = 0, -self.HELD, 0, 1
        # Tokens of the text before this round, the prompt's included.
        self.length = 0
        self.plan = self.chosen = self.best = NOTHING
        self.is_a_try = self.is_pausing = self.rests_with_plain = self.is_sure = False
        # Whether many drafts of earlier texts are known; and what rounds without one have to be faster by, once that is known.
        self.is_informed, self.handicap = knowledge.earlier.num_judged >= Tries.SURE, None
        self.costs = Costs()
        # Tokens that were accepted in this round of what the text alone suggested.
        self.num_alone = 0
        # Of rounds from which nothing was learned yet: what was accepted; and lengths and seconds.
        self.outcomes: list[RoundOutcome] = []
        self.untold: list[tuple[int, float]] = []
        self.at_once = self.FEW_AT_ONCE
        self.started = self.begun = clock()
        # Seconds of all rounds.
        self.spent = 0.0
        # Costs of the batch that a call begins with; and rounds that drafted.
        self.of_call: Costs | None = None
        self.num_drafted = 0
        # The most tokens to write; and whether the call is left to plain `generate` for being short.
        self.most, self.is_short = 0, False
        # Whether whole calls with drafts were found to be no slower than plain `generate`'s.
        self.gets_a_trial = False

    def ends_too_soon(self, batch: int, length: int, most: int) -> bool:
        """Whether a call writes so few tokens that drafts save less time than it takes to begin with them.

        Args:
            batch, length: of the prompts.
            most: the most tokens to write.
        """
        self.most, beginnings = most, self.knowledge.beginnings
        self.checks.may_save = self.knowledge.may_save * beginnings.expected_tokens(most)
        begins = beginnings.seconds(length)
        if not self._may_be_left(batch, length) or begins is None:
            return False
        costs = self.costs
        # The prompt's forward writes one.
        num_left = max(beginnings.expected_tokens(most) - 1, 0.0)
        undrafted = num_left * costs.of(NOTHING)
        if begins < Beginnings.MATTERS * undrafted:
            return False
        self._work_out()
        saved = undrafted / costs.lead_of_plain(batch > 1) - self.worth.seconds_of_drafted(num_left)
        self.is_short = saved < begins and not self.tries.begins_a_call(costs)
        return self.is_short

    def leaves_to_plain(self, batch: int, length: int) -> bool:
        """Whether plain `generate` is better for a call of so many items of this length, and nothing is to be tried in it."""
        may_be_left = self._may_be_left(batch, length) and (self._may_leave or self.costs.drafted_calls.count)
        # What is due was found to be tried, and paid for, in a short call.
        if not may_be_left or self.tries.due is not None:
            return False
        self._work_out()
        self.best = NOTHING
        # To be left once, so that whole calls are compared, is for those of which rounds don't tell.
        is_open = self.costs.plain_calls.count > 0 or not self.worth.clearly_drafted
        are_compared = batch > 1 and is_open and not self.costs.plain_is_slower(is_of_batch=True)
        are_slower = self.costs.drafted_calls_are_slower(self.costs.of(NOTHING)) if are_compared else None
        is_plain = self.worth.is_surely_plain(self.costs) if are_slower is None else are_slower
        self.gets_a_trial = are_slower is False
        return is_plain and not (self.checks.begin_a_call() or self.tries.begins_a_call(self.costs))

    def _may_be_left(self, batch: int, length: int) -> bool:
        """Go by such a call from here on; returns whether enough is known to leave it to plain `generate`."""
        self.costs, self.batch = self.knowledge.costs_for(batch), batch
        self.costs.length = self.rounds.length_that_matters(length)
        is_judged = self.knowledge.earlier.num_judged >= self.JUDGED
        return self.rounds.may_be_left and self.rounds.is_known(self.costs) and is_judged

    def _work_out(self) -> None:
        """Find what plans are worth, before the first round; nothing is learned between the two questions of whole calls."""
        if not self.worth.seconds:
            self.worth.work_out(self.costs, self.batch)

    def leaves_rest_to_plain(self) -> bool:
        """Whether plain `generate` is better for the rest of a call, too: to be asked before each round."""
        if not (self.rests_with_plain and self._may_leave) or self.tries.is_affordable:
            return False
        return self.batch > 1 or not self.checks.stay(self.num_drafted, self.costs.lead_of_plain(False))

    @property
    def _may_leave(self) -> bool:
        """Whether it is known what a batch's rounds without a draft take, which may be far less than plain `generate`'s steps."""
        return self.batch == 1 or self.costs.undrafted.count >= Costs.ENOUGH

    def end_call(self, num_steps: int) -> None:
        """Learn that a call was not left, which plain `generate` would have made so many steps in."""
        self._end_checks(0)
        costs, self.of_call = self.of_call, None
        self.knowledge.beginnings.note_call(num_steps, self.most)
        if costs is not None and self.num_drafted >= self.MOSTLY_DRAFTED * self.num_rounds:
            # The first one finds out what rounds cost: no later one takes as long.
            is_first, costs.was_drafted = not costs.was_drafted, True
            if not is_first:
                costs.note_call(self.clock() - self.begun, num_steps, is_plain=False)

    def note_plain(self, num_rounds: int) -> None:
        """Learn that plain `generate` has written so many tokens instead, in the time since the last round."""
        now = self.clock()
        self._end_checks(num_rounds)
        self.knowledge.beginnings.note_call(self.num_rounds + num_rounds, self.most)
        # Of so few steps the prompt, and what comes before it, takes too much.
        if num_rounds and not self.is_short:
            self.costs.note_plain((now - self.started) / num_rounds, num_rounds)
        if num_rounds and not (self.num_rounds or self.is_short):
            self.costs.note_call(now - self.begun, num_rounds, is_plain=True)
        elif self.of_call is not None:
            self.of_call.note_left()
        self.started = now
        self._put_in(num_rounds)
        self.knowledge.num_left += 1

    def _end_checks(self, num_plain: int) -> None:
        """Learn what drafts have saved of one text, of which plain `generate` has written so many tokens in the end."""
        is_one = self.batch == 1 and self.of_call is None and self.rounds.may_be_left
        if is_one and self.num_drafted >= TextChecks.AT_FIRST and self.worth.seconds:
            self.checks.end(num_plain, self.worth.seconds_of_rest(self.costs))

    @property
    def looks_back(self) -> bool:
        """Whether to find out what the text would have suggested where plain `generate` has just written it.

        Only our own rounds read what it suggests, and a call that is left to plain `generate` has none.
        """
        num_left = self.knowledge.num_left
        is_due = num_left <= self.FIRST_LOOKS_BACK or num_left % self.LOOKS_BACK == 1
        return is_due and self.batch == 1 and bool(self.worth.seconds) and self.costs.reading.of(1) is not None

    def worth_reading_without_drafts(self, probabilities: Sequence[float]) -> int:
        """As [`worth_reading_alone`], of a round that has no plan otherwise."""
        return self.worth.count_alone(probabilities, NOTHING, self.costs.reading)

    def note_text(self, num_read: int, num_tokens: int) -> None:
        """Learn what a round would have committed, the bonus token counted, with so many tokens that the text suggested."""
        seconds = self.worth.seconds_alone(num_read, self.costs.reading)
        self.knowledge.text_gain.note(num_tokens, seconds / self.worth.seconds[NOTHING])

    def next_plan(self, batch: int, room: int, length: int) -> Plan:
        """What to do in the round that now begins.

        Args:
            batch: items that go on.
            room: the most tokens that are worth drafting.
            length: of the longest item's text, the prompt included.
        """
        self.num_rounds += 1
        self.length = self.rounds.length_that_matters(length)
        if self.num_rounds == 1:
            self.knowledge.beginnings.note_set_up(self.clock() - self.begun)
            self.of_call = self.knowledge.costs_for(batch) if batch > 1 else None
        self.checks.begin_round(self.num_rounds, self.spent, self.length)
        if not self.untold or batch != self.batch or room < self.plan.depth:
            self._choose(batch, room)
            # To think it over is no part of the round: tries, before which that is done, would seem slow for it.
            self.started = self.clock()
        self.reading.begin_round(self.num_rounds, self.is_a_try)
        return self.plan

    def _choose(self, batch: int, room: int) -> None:
        """Choose the plan of this round."""
        self.learn()
        costs = self.knowledge.costs_for(batch)
        self.reading.costs = costs.reading
        if costs is not self.costs:
            self.costs, self.reconsidered = costs, -self.HELD
        self.batch = batch
        costs.length = self.length
        self.plan, self.is_a_try = NOTHING, False
        if room:
            choice = self._choice()
            if choice.depth > room and self.worth.seconds:
                # A try of less than the plan would teach nothing.
                choice, self.tries.again = self.best, None
            self.is_a_try, self.is_pausing = choice != self.best, choice == NOTHING
            self.chosen, self.plan = choice, choice.within(room)
            costs.chosen.add(choice)

    def worth_reading_alone(self, probabilities: Sequence[float]) -> int:
        """How many tokens that the text alone suggests to read instead of a draft; 0 where the best plan is better.

        Args:
            probabilities: of each token, that it and all before it will be accepted.
        """
        return 0 if self.is_a_try else self.worth.count_alone(probabilities, self.best, self.reading.costs)

    def drop_plan(self) -> None:
        """Nothing is drafted in this round: what the text suggests is read instead."""
        self.learn()
        self.plan = NOTHING

    def note(
        self,
        outcomes: Sequence[tuple[int, int]],
        of_chains: Sequence[tuple[int, int]] | None = None,
        items: Sequence[int] | None = None,
    ) -> None:
        """Learn what was accepted in this round; see [`RoundOutcome`]."""
        self.num_alone = outcomes[0][0] if outcomes and not self.plan.depth else 0
        if self.plan.depth and outcomes:
            self.outcomes.append(RoundOutcome(outcomes, of_chains, self.reading.is_whole, items))

    def end_round(self, is_ordinary: bool, is_unique: bool = False, stands_for: int = 1) -> None:
        """Learn how long the round took.

        Args:
            is_ordinary: whether others like it would take as long.
            is_unique: whether it did what no other round does, whatever it drafts: a prompt was read, something was compiled.
            stands_for: how many rounds without a draft it read for, so that the drafter may draft again.
        """
        now = self.clock()
        seconds, self.started = now - self.started, now
        self.spent += seconds
        num_alone, self.num_alone = self.num_alone, 0
        self.num_drafted += self.plan.depth > 0
        self.in_a_row = self.in_a_row + 1 if self.plan == self.last else 1
        self.last = self.plan
        is_cold = self.in_a_row <= self.rounds.num_cold(seconds)
        is_usual, reads_up = not (is_unique or is_cold), stands_for > 1
        if self.num_drafted == 1 and self.plan.depth and not (is_ordinary or is_unique):
            usual = self.costs.of(self.plan)
            if usual is not None:
                self.knowledge.beginnings.note_reading(seconds - usual, self.length)
        # Of a batch no round reads what the texts suggest alone, and compiled ones are not left to plain `generate`.
        reads_alone = self.plan == self.best == NOTHING and self.batch == 1 and self.rounds.may_be_left
        if reads_alone and is_usual and not reads_up and self.worth.seconds:
            self.knowledge.text_gain.note(1 + num_alone, seconds / self.worth.seconds[NOTHING])
        if is_usual and reads_up:
            self.costs.note_upkeep(seconds, stands_for)
        is_ordinary = is_ordinary and is_usual and not reads_up
        if is_ordinary and self.plan == self.best and self.costs.is_settled(self.plan):
            self.untold.append((self.length, self.reading.of_whole(seconds, self.plan.num_nodes)))
            if len(self.untold) >= self.at_once:
                self.learn()
            return
        if self.is_a_try or not self.worth.seconds:
            self._pay(seconds, is_ordinary, is_unique)
        else:
            self._put_in(1.0)
        # Where there never is room for all of it, less of what has to be measured before there is a choice tells what it costs.
        measured = self.chosen if self.plan.depth and self.rounds.opening(self.costs) == self.chosen else self.plan
        if measured in self.plans:
            self.tries.note(measured, seconds, is_ordinary, self.is_a_try, self.costs, self.best, self._accepted)
            whole = self.reading.of_whole(seconds, self.plan.num_nodes)
            self.costs.note(measured, whole if is_ordinary else None, self.length)
        self.learn()

    def learn(self) -> None:
        """Learn from the last rounds, all of one plan: to be called when there are no more."""
        outcomes, self.outcomes = self.outcomes, []
        if outcomes:
            self.knowledge.note(self.plan.budget, *outcomes)
        if self.untold:
            self._put_in(len(self.untold))
            untold, self.untold = self.untold, []
            for length, seconds in untold:
                self.costs.note(self.plan, seconds, length)

    def _put_in(self, rounds: float) -> None:
        """Save for tries, see [`Knowledge.put_in`]."""
        is_of_batch = self.batch > 1 or self.of_call is not None
        self.knowledge.put_in(rounds, self.is_sure, is_of_batch)
        if not (self.best.depth or is_of_batch) and self.rounds.may_be_left:
            self.knowledge.savings.put_in(rounds, self.knowledge.may_save)

    def _pay(self, seconds: float, is_ordinary: bool, is_unique: bool) -> None:
        """Put into the purse what this round adds, and take out of it what it has lost if it was a try."""
        best, expected = self.costs.of(self.best), self.costs.of(self.plan)
        # What every first call does is no matter of luck.
        if not best or (self.rounds.opens_free and self.rounds.opening(self.costs) is not None):
            return
        charged = expected or best if is_unique else self.costs.charged(self.plan, seconds)
        self._put_in(charged / best)
        if self.is_a_try:
            self.tries.pay(self.plan, self.best, (expected if is_ordinary else None) or charged, best, self._accepted)

    @property
    def _accepted(self) -> list[int]:
        """Of each draft from which nothing was learned yet, how many tokens were accepted."""
        return [count for outcome in self.outcomes for count, _ in outcome.of_drafts]

    def _choice(self) -> Plan:
        if self.tries.again is not None:
            return self.tries.again
        opening = self.rounds.opening(self.costs)
        if opening is not None:
            self.best = NOTHING
            self.worth.expect(self.batch)
            return opening
        # A text that has just begun may be another than the last.
        held = min(self.HELD, 2 + self.num_rounds // 2)
        if self.num_rounds >= self.reconsidered + held or self.costs.num_surprises != self.num_surprises:
            self._reconsider()
        # Where the purse is too small for it, it is saved up for: the cheapest tries are not the ones that say most. And nothing
        # is tried before a batch is left to plain `generate`.
        is_waiting = self.rests_with_plain and not self._may_leave
        if not self.tries.is_affordable or (is_waiting and self.tries.loss > 0):
            return self.best
        self.reconsidered = -self.HELD
        return self.tries.next

    def _reconsider(self) -> None:
        """Find the best plan by what is known now, and what to try next."""
        self.reconsidered, self.num_surprises = self.num_rounds, self.costs.num_surprises
        self.worth.work_out(self.costs, self.batch)
        is_long = self.worth.seconds[NOTHING] >= LONG_ROUND
        self.knowledge.note_length(is_long)
        plans = [plan for plan in self.plans if self.rounds.is_there(plan, self.costs)]
        self.best = max(plans, key=self._preference)
        drafts_pay = self.worth.rate(self.best) >= Costs.MOST_LEAD * self.worth.rate(NOTHING)
        self.is_sure, may_be_left = drafts_pay and self.costs.are_sure, self.batch == 1 and not drafts_pay
        self.at_once = self.FEW_AT_ONCE if is_long or may_be_left else self.AT_ONCE
        if not is_long:
            worth_it = self.WORTH_COMPILING * self.worth.rate(self.best)
            missing = (plan for plan in self.plans if plan not in plans and self.worth.rate(plan) > worth_it)
            self.tries.due = self.tries.due or next(missing, None)
        matters = self.rounds.may_be_left and (self.batch > 1 or not is_long)
        if self.handicap is None:
            # Of one text plain `generate` may be what is better.
            pay = self.batch > 1 or self.worth.rate(self.best) * self.worth.seconds_of_rest(self.costs) > 1
            have_paid = self.best.depth and self.is_informed and pay
            self.handicap = self.LEAD_WHERE_DRAFTS_PAID if have_paid else 1.0
        may_rest = matters and self.knowledge.chain.num_judged >= self.JUDGED
        is_tried = not self.gets_a_trial or self.num_drafted >= self.FAIR_TRIAL
        self.rests_with_plain = may_rest and is_tried and self.worth.is_surely_plain(self.costs, self.handicap)
        if may_rest and self.batch > 1:
            self.best = self._before_a_batch_is_left()
        self.reading.know(self.worth.rate(self.best), self.plans[-1].num_nodes)
        self.tries.choose(self.costs, self.best, plans)

    def _before_a_batch_is_left(self) -> Plan:
        """What to follow in a batch that plain `generate` may soon be left with: drafts, which alone teach, until that is sure.

        And then rounds without a draft until it is known what they take.
        """
        if self.rests_with_plain:
            return self.best if self._may_leave else NOTHING
        # Neither calls with drafts, though slower than rounds without one, nor steps tell that plain `generate` is faster.
        is_kept = self.gets_a_trial and self.costs.lead_of_plain(True) == 1.0
        is_followed = self.best.depth or is_kept or self.costs.plain_is_slower(True)
        return self.best if is_followed else self.worth.best_drafted

    def _preference(self, plan: Plan) -> float:
        """How good a plan is to follow."""
        is_known = plan == self.best or self.costs.is_settled(plan)
        preference = self.worth.rate(plan) * (1.0 if is_known else self.rounds.FOLLOWED)
        return preference if plan.depth else preference / max(self.handicap or 1.0, self.rounds.LEAD_WITHOUT_DRAFTS)
