"""The rounds of a call: draft, verify, commit. One host synchronisation a round."""

from itertools import islice
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..models.inputs import DraftInputs, cached_arange, last_columns
from .call import DecodingCall
from .candidate_generator import ParallelCandidateGenerator
from .choosing.choice import LikeliestToken, PlainDraw, RejectionSampling, TokenChoice, choose_along_the_path
from .choosing.noise import StepNoise
from .choosing.processors import DraftColumns, ItemProcessors, is_prefix_free, process_everywhere
from .draft_judge import DraftJudge, lookup_for
from .scheduling.plans import NOTHING, Plan
from .stats import Proposal, Stopwatch, synchronizer
from .target_side.cache import Snapshot
from .target_side.positions import room_before
from .target_side.prompt import PendingTokens
from .tree.token_tree import TokenTree, draft_chain
from .tree.verify import Acceptance, accept, paths_on_host, plain_step
from .tree_search import TreeSearch


class SpeculativeDecoding(DecodingCall):
    """[`DecodingCall`] with speculative rounds.

    Args:
        target, candidates, logits_processor, generation_config, **arguments: of [`DecodingCall`].
    """

    def __init__(
        self,
        target: PreTrainedModel,
        candidates: ParallelCandidateGenerator,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **arguments: Any,
    ) -> None:
        super().__init__(
            target,
            candidates=candidates,
            logits_processor=logits_processor,
            generation_config=generation_config,
            **arguments,
        )
        self.settings = candidates.settings
        self.do_sample = bool(generation_config.do_sample)
        self.search = TreeSearch(self.settings, candidates.drafter, generation_config._eos_token_tensor, self.do_sample)
        self.processors = logits_processor
        self.process_item = ItemProcessors(logits_processor, self.batch)
        self.processes_in_bulk = is_prefix_free(logits_processor)
        # Whether others take as long as this round; and whether it does what no other round does.
        self.plan, self.is_ordinary, self.is_unique = NOTHING, False, False
        self.judge = DraftJudge(self.schedule, lookup_for(self.settings, self.reader.is_hybrid))
        self.stopwatch = Stopwatch(candidates.stats, self.settings.time_rounds, synchronizer(target.device))
        # Of rounds with trees: where the statistics have them, the items that they were about, and how many levels each had.
        self.levels: list[tuple[int, list[int], torch.LongTensor]] = []

    def begin(self) -> None:
        # Tokens of the columns of the drafter's logits; `None` if they are the same.
        self.token_ids = self.candidates.token_ids(self.sequences.device)
        self.choice = self._choice()
        if self.judge.lookup is not None:
            text = self.prompt_text
            columns = last_columns(text.counts, *text.ids.shape)
            self.judge.lookup.begin([ids[own[0] :] for ids, own in zip(text.ids.tolist(), columns, strict=True)])

    def end(self) -> None:
        self.schedule.learn()
        self._tell_levels()

    def round(self) -> None:
        """Draft, read, verify and commit once."""
        if self.prompt is None and self.inputs.rereads(self.sequences.lengths[0]):
            self._read_all_again()
        self.plan = self._plan()
        with self.stopwatch.part("tree"):
            tree = self._text_alone()
        with self.stopwatch.part("draft"):
            draft_logits = self._draft_logits()
        with self.stopwatch.part("tree"):
            tree = tree if draft_logits is None else self._proposal(draft_logits)
        with self.stopwatch.part("verify"):
            start, anchor = self.reader.cache.get_seq_length(), self.pending
            snapshot = self.reader.cache.snapshot() if self.reader.is_hybrid and tree is not None else None
            self.schedule.reading.begin()
            outputs = self._read(tree)
            acceptance, scores, logits = self.verify(outputs.logits, tree)
            paths, new_tokens = paths_on_host(acceptance)
            if self.is_ordinary:
                self.schedule.reading.end(1 + (tree.num_nodes if tree else 0))
            # Without a draft, a round is as plain as its plan only if nothing but its own token is read.
            self.is_ordinary = self.is_ordinary and (tree is None or self.plan.depth > 0)
        with self.stopwatch.part("commit"):
            self.recorder.add_scores(self.items, paths, scores, logits)
            counts = self.cut(new_tokens)
            self._note(tree, paths, new_tokens, counts)
            paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
            self.commit(outputs, start, paths, acceptance.tokens)
            if snapshot is not None and counts[0] <= tree.num_nodes:
                self._forget_rejected(snapshot, start, anchor, counts[0])
            self._drop_finished_items()
        # What a target with recurrent layers has to read again is part of the price of this round.
        if not (self.reader.is_hybrid and self.pending.num_reread and self.items):
            self.schedule.end_round(self.is_ordinary, self.is_unique)

    def verify(
        self, logits: torch.Tensor, tree: TokenTree | None
    ) -> tuple[Acceptance, torch.Tensor, torch.Tensor | None]:
        """Choose a token at every slot of `logits (batch, slots, vocab)`, and accept; also what [`choose`] returns besides."""
        choices, scores, raw_logits = self.choose(logits, tree)
        return (plain_step(choices) if tree is None else accept(tree, choices)), scores, raw_logits

    def choose(
        self, logits: torch.Tensor, tree: TokenTree | None
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor | None]:
        """The target's choices `(batch, slots)`; also the processed scores and, if they were asked for, raw logits.

        Like plain `generate`'s, these are what a processor leaves of them that writes over what it is given.
        """
        logits = logits.to(device=self.sequences.device, dtype=torch.float32)
        return *self._choices(logits, tree), logits if self.recorder.logits is not None else None

    def _choices(self, logits: torch.Tensor, tree: TokenTree | None) -> tuple[torch.LongTensor, torch.Tensor]:
        """The choices and processed scores of [`choose`], from logits in float32."""
        if self.processes_in_bulk:
            scores = process_everywhere(logits, self.processors)
            return self.choice.everywhere(scores, tree), scores
        walked = logits, self.process_item, self.choice, self.items, self.sequences, tree
        return choose_along_the_path(*walked, self.stop.is_known_end)

    def _choice(self) -> TokenChoice:
        """How this call chooses its tokens."""
        if not self.do_sample:
            return LikeliestToken()
        columns = DraftColumns(self.token_ids, self.candidates.drafter.config.vocab_size)
        warpers = columns.warpers(self.processors)
        if self.settings.verification == "rejection":
            return RejectionSampling(warpers, columns)
        deepest = max(self.schedule.deepest, self.judge.deepest)
        noise = StepNoise(self.batch, self.sequences.device, deepest + 1)
        return PlainDraw(warpers, noise, self._chooses_in_plain_order(), columns)

    def _chooses_in_plain_order(self) -> bool:
        """Whether tokens are chosen one by one, each for all items: then other users of random numbers may come between."""
        return self.batch == 1 and not self.processes_in_bulk

    def commit(self, outputs: Any, start: int, paths: list[list[int]], tokens: torch.LongTensor) -> None:
        """Keep the accepted part of the cache, and tell the drafter what is new.

        Args:
            outputs: of the target's forward.
            start: cache columns before it.
            paths: for each item, the slots that were read and kept, the anchor's first; its text has grown by as many tokens.
            tokens: `(batch, most)`, these tokens, and anything after them.
        """
        # The bonus token was chosen, not read, so the cache is one entry short of the text.
        nodes = [[slot - 1 for slot in path[1:]] for path in paths]
        self._record_states(outputs, start, nodes)
        self.reader.keep(start, self.pending, nodes)
        counts = [len(path) for path in paths]
        most, device = max(counts), self.sequences.device
        uneven = None if min(counts) == most else counts
        ahead = cached_arange(1, most + 1, device)
        if uneven is None:
            new_ids = tokens[:, :most]
        else:
            # What stands before the new tokens of an item that got fewer is meaningless, but such as exist.
            ahead = ahead - (most - torch.tensor(counts, device=device)[:, None])
            new_ids = tokens.gather(1, (ahead - 1).clamp(min=0))
        new_positions = self.pending.anchor_positions + ahead
        context = DraftInputs(new_ids, new_positions, new_counts=uneven)
        if self.candidates.taps:
            self.candidates.add_features(context, outputs, self.pending, self.reader.positions, nodes)
        self.candidates.observe(context)
        self.pending = PendingTokens(new_ids[:, -1:], new_positions[:, -1:])

    def _draft_logits(self) -> torch.Tensor | None:
        """The drafter's forward of this round, see [`ParallelCandidateGenerator.draft_logits`]."""
        return self.candidates.draft_logits(self.plan.depth)

    def _read(self, tree: TokenTree | None) -> Any:
        """The target's forward of this round."""
        if self.prompt is None:
            return self.reader.read(self.pending, tree, last_positions=self._last_positions(tree))
        prompt, self.prompt = self.prompt, None
        return self.reader.read_prompt(prompt, tree)

    def _last_positions(self, tree: TokenTree | None) -> torch.LongTensor | None:
        """The last positions that the items' texts may get to, see [`TargetReader.read`]; `None` if no node is beyond them.

        There is as much room for a draft as the shortest text leaves, and more than the longest one has.
        """
        is_near = tree is not None and max(self.sequences.lengths) + tree.num_nodes >= self.candidates.max_length
        return self.ends_of_items()[self.items] if is_near and len(self.items) > 1 else None

    def _read_all_again(self) -> None:
        """Forget what was read of all texts, since plain `generate` reads them again from here. They have one length."""
        self.reader.forget_all()
        text, num_new = self.prompt_text, self.sequences.lengths[0] - self.prompt_length
        ahead = torch.arange(1, num_new + 1, device=text.positions.device)
        ids = torch.cat([text.ids, self.sequences.last(num_new)], dim=1)
        positions = torch.cat([text.positions, text.positions[:, -1:] + ahead], dim=1)
        counts = text.counts and [count + num_new for count in text.counts]
        self.pending = PendingTokens(ids, positions, counts, num_reread=ids.shape[1] - 1)

    def _forget_rejected(self, snapshot: Snapshot, start: int, anchor: PendingTokens, num_new: int) -> None:
        """Go back to before this round where rejected tokens can't be removed: the next round reads the accepted ones again.

        It then drafts nothing, so that the state after them is never mixed with that of a draft. Batch 1.
        """
        self.reader.cache.restore(snapshot)
        self.reader.cache.forget_from(start)
        ids = torch.cat([anchor.ids, self.sequences.last(num_new)], dim=1)
        positions = anchor.positions + torch.arange(num_new + 1, device=ids.device)
        self.pending = PendingTokens(ids, positions, num_reread=num_new)

    def _plan(self) -> Plan:
        """What to draft in this round."""
        if self.reader.is_hybrid and self.pending.num_reread:
            return NOTHING
        reads_text = self._reads_text
        room = self._room(self.schedule.deepest) if not reads_text or self._drafts_after_a_prompt() else 0
        plan = self.schedule.next_plan(len(self.items), room, max(self.sequences.lengths))
        # A drafter that was left out for long has more to read than in other rounds.
        has_caught_up = plan.depth == 0 or self.candidates.pending.num_tokens <= self.schedule.deepest + 1
        self.is_ordinary, self.is_unique = has_caught_up and not reads_text, reads_text
        return plan

    @property
    def _reads_text(self) -> bool:
        """Whether the target has more to read than each item's last token: the prompt, or a text again."""
        return self.prompt is not None or self.pending.ids.shape[1] > 1

    def _room(self, depth: int) -> int:
        """How many of `depth` tokens are worth drafting."""
        depth = self.stop.room(min(self.sequences.lengths), depth)
        if self.inputs.counts_tokens:
            # Items of a batch advance together where the text of one may come to stand beyond a change, or the last position.
            longest = max(self.sequences.lengths) - self.columns_before
            depth = room_before(self.inputs.last_read, longest, self.inputs.rope.room(longest, depth))
        return self.inputs.room(max(self.sequences.lengths), depth)

    def _drafts_after_a_prompt(self) -> bool:
        """Whether the target can read a draft together with a longer text.

        Several items are read with the target's own mask, which has no room for drafts. A snapshot has to be of the state
        after all that is committed. And an image's tokens are counted by the target.
        """
        return len(self.items) == 1 and not self.reader.is_hybrid and not (self.prompt and self.prompt.extra)

    def _text_alone(self) -> TokenTree | None:
        """What the text suggests by itself, where to read that beats this round's plan: then nothing is drafted."""
        room = self._room_for_matches() if len(self.items) == 1 and not self._reads_text else 0
        tree = self.judge.worth_reading_alone(room, self.sequences.device) if room else None
        if tree is not None and self.plan != NOTHING:
            self.plan = NOTHING
            self.schedule.drop_plan()
        return tree

    def _proposal(self, draft_logits: torch.Tensor) -> TokenTree | None:
        """What to propose, from marginal logits `(batch, depth, columns)`."""
        return self.choice.propose(draft_logits.to(self.sequences.device), self._search)

    def _search(self, draft_logits: torch.Tensor) -> TokenTree | None:
        """The chain or tree in logits `(batch, depth, columns)`."""
        # A text is read with the target's own mask, which has no room for branches.
        if self._reads_text:
            return draft_chain(draft_logits, self.token_ids)
        if self.reader.is_hybrid or not self.plan.budget:
            return self.judge.worth_reading(draft_chain(draft_logits, self.token_ids), draft_logits, self.token_ids, 0)
        found = self.search.tree(draft_logits, self.sequences, self.plan.budget, self.token_ids, return_chain=True)
        return self._judged(*found, draft_logits)

    def _judged(self, tree: TokenTree, chain: torch.LongTensor, draft_logits: torch.Tensor) -> TokenTree | None:
        """What is worth reading of the tree in logits `(batch, depth, columns)`, and of what the texts suggest.

        Args:
            chain: what would be drafted in the tree's place, `(batch, depth)`.
        """
        self.judge.remember_chain(chain)
        room = self._room_for_matches() if self.schedule.reading.may_look else 0
        return self.judge.worth_reading(tree, draft_logits, self.token_ids, room)

    def _room_for_matches(self) -> int:
        """How many tokens of what the texts suggest there is room for after the longest; 0 if they suggest nothing."""
        if not self.judge.finds_any():
            return 0
        return self._room(self.stop.room(max(self.sequences.lengths), self.judge.deepest))

    def _note(
        self, tree: TokenTree | None, paths: list[list[int]], new_tokens: list[list[int]], counts: list[int]
    ) -> None:
        """Tell the choice, the statistics and the schedule how the round went."""
        new_tokens = [tokens[:count] for tokens, count in zip(new_tokens, counts, strict=True)]
        self.choice.advance(new_tokens)
        num_drafted, items = tree.num_nodes if tree else 0, self._noted_items()
        accepted = [min(len(path) - 1, count) for path, count in zip(paths, counts, strict=True)]
        noted = [accepted[item] for item in items]
        if tree is not None and not tree.is_chain:
            # On the device, which is not waited for before the end of the call.
            self.levels.append((len(self.candidates.stats.depths_per_round), items, tree.depths[:, -1].clone()))
        self.candidates.stats.add_round([num_drafted] * len(items), noted, [counts[item] for item in items])
        if tree is not None and self.settings.record_drafts:
            self._record(tree, accepted, counts)
        outcomes = [self._outcome(len(paths[item]), counts[item]) for item in items]
        self.judge.note(tree is not None, outcomes, paths, new_tokens, items, self.items)

    def _tell_levels(self) -> None:
        """Note of each round's tree how many levels it had."""
        if not self.levels:
            return
        told, known = iter(torch.cat([levels for *_, levels in self.levels]).tolist()), self.candidates.stats
        for first, items, levels in self.levels:
            of_round = list(islice(told, len(levels)))
            known.depths_per_round[first : first + len(items)] = [of_round[item] for item in items]

    def _outcome(self, num_chosen: int, count: int) -> tuple[int, int]:
        """What a round says of an item's draft, see [`AcceptanceRates.note`], of whose chosen tokens `count` were committed."""
        if count < num_chosen:
            # The text ended in accepted tokens.
            return count, min(count, self.plan.depth)
        return count - 1, min(count, self.plan.depth)

    def _noted_items(self) -> list[int]:
        """The items of the batch whose text this round was about."""
        return list(range(len(self.items)))

    def _record(self, tree: TokenTree, accepted: list[int], counts: list[int]) -> None:
        """Note what was proposed to each item."""
        all_tokens, all_depths = tree.tokens.tolist(), tree.depths.tolist()
        for index in self._noted_items():
            tokens, depths = all_tokens[index], all_depths[index]
            num_before = self.sequences.lengths[index] - counts[index] - self.prompt_length
            self.candidates.stats.proposals.append(
                Proposal(self.items[index], num_before, tuple(tokens), tuple(depths), accepted[index], counts[index])
            )
