"""The loop: draft, verify, commit, until generation is over. One host synchronisation a round."""

from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..models.inputs import DraftInputs, cached_arange, last_columns
from .candidate_generator import ParallelCandidateGenerator
from .choosing.choice import LikeliestToken, PlainDraw, RejectionSampling, choose_along_the_path
from .choosing.noise import StepNoise
from .choosing.processors import DraftColumns, ItemProcessors, is_prefix_free, process_everywhere
from .draft_judge import DraftJudge
from .inference_mode import mode_for
from .outputs import ItemRead, OutputRecorder
from .packing.packed_layers import packed_layers
from .prompt_lookup import MATCHING_NGRAM_SIZE, PromptLookup
from .scheduling.fixed import FixedSchedule
from .scheduling.plans import NOTHING, Plan
from .scheduling.schedule import Schedule
from .sequences import FinishedItems, StopChecks, TokenBuffer
from .stats import Proposal, Stopwatch, synchronizer
from .target_side.cache import Entries, Snapshot, attended_layers, is_callers
from .target_side.reader import TOKEN_TYPES, PendingTokens, Prompt, TargetReader, prompt_without_padding
from .target_side.rope import longest_text
from .target_side.shared_keys import shared_keys
from .target_side.step_inputs import SLICED_INPUTS, StepInputs
from .target_side.structure import layer_types_of
from .tree.token_tree import TokenTree, draft_chain
from .tree.verify import Acceptance, accept, paths_on_host, plain_step
from .tree_search import TreeSearch
from .undrafted import PlainRest


class SpeculativeDecoding:
    """One generate call of a target with a drafter; see [`run`].

    The items of a batch go their own ways: each commits what it accepts, and leaves the batch when it is over. `items` says
    which of the caller's items are still there; everything of a round has its items in that order.

    Args:
        target: the model whose text is written.
        candidates: the drafter's side.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as `generate` prepared them.
        schedule: what each round drafts and verifies.
        batch: number of items.
        inputs: what plain `generate` would give the target in each step, see [`step_inputs`].
    """

    def __init__(
        self,
        target: PreTrainedModel,
        candidates: ParallelCandidateGenerator,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
        schedule: Schedule | FixedSchedule,
        batch: int = 1,
        inputs: StepInputs = SLICED_INPUTS,
    ) -> None:
        self.candidates = candidates
        self.settings = candidates.settings
        self.do_sample = bool(generation_config.do_sample)
        self.search = TreeSearch(self.settings, candidates.drafter, generation_config._eos_token_tensor, self.do_sample)
        self.processors = logits_processor
        self.process_item = ItemProcessors(logits_processor, batch)
        self.processes_in_bulk = is_prefix_free(logits_processor)
        self.batch = batch
        self.stop = StopChecks(stopping_criteria, batch)
        self.streamer = streamer
        padding = generation_config._pad_token_tensor
        self.finished = FinishedItems(0 if padding is None else int(padding))
        text_config = target.config.get_text_config(decoder=True)
        self.inputs = inputs
        layer_kwargs = layer_types_of(text_config)[1]
        windows = [layer_kwargs[source].get("sliding_window") for source in attended_layers(text_config)]
        self.recorder = OutputRecorder(generation_config, batch, windows)
        self.model_kwargs = model_kwargs
        requested = dict(candidates.model_kwargs_overrides)
        if self.recorder.attentions is not None:
            requested["output_attentions"] = True
        self.reader = TargetReader(target, model_kwargs, requested)
        self.rest = PlainRest(
            target,
            generation_config,
            model_kwargs,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
        )
        # Whether others take as long as this round; and whether it does what no other round does.
        self.schedule, self.plan, self.is_ordinary, self.is_unique = schedule, NOTHING, False, False
        self.judge = DraftJudge(schedule, self._prompt_lookup())
        self.stopwatch = Stopwatch(candidates.stats, self.settings.time_rounds, synchronizer(target.device))
        self.items = list(range(batch))
        # Of rounds with trees: where the statistics have them, the items that they were about, and how many levels each had.
        self.levels: list[tuple[int, list[int], torch.LongTensor]] = []
        cache = model_kwargs["past_key_values"]
        self.mode = mode_for(target, generation_config, logits_processor, stopping_criteria, cache, candidates.drafter)
        models = target, candidates.drafter, *candidates.gathered_heads()
        self.packing = packed_layers(*models, wanted=self.settings.pack_weights)
        self.sharing = shared_keys(target)

    def run(self, input_ids: torch.LongTensor) -> Any:
        """Continue `input_ids (batch, length)`; returns what `generate` returns."""
        with self.packing, self.sharing:
            return self._run(input_ids)

    def _run(self, input_ids: torch.LongTensor) -> Any:
        """See [`run`]."""
        with self.mode:
            self.prompt_length = input_ids.shape[1]
            self.sequences = TokenBuffer(input_ids)
            # Tokens of the columns of the drafter's logits; `None` if they are the same.
            self.token_ids = self.candidates.token_ids(self.sequences.device)
            self.choice = self._choice()
            self._lay_out_prompt(input_ids)
            while self.items and not (self.schedule.leaves_rest_to_plain() and self._rest_is_like_plain()):
                self.round()
            self.schedule.learn()
            self._tell_levels()
            if self.items:
                self._set_texts_aside()
        if self.items:
            return self._leave_rest()
        text = self.finished.text(self.stop.common_length())
        # Before whoever waits for the end of the stream seeds the generator for something else.
        self.choice.finish(text.shape[1] - self.prompt_length)
        if self.streamer is not None:
            self.streamer.end()
        return self._result(text)

    def round(self) -> None:
        """Draft, read, verify and commit once."""
        if self.prompt is None and self.inputs.rereads(self.sequences.lengths[0]):
            self._read_all_again()
        self.plan = self._plan()
        with self.stopwatch.part("tree"):
            tree = self._text_alone()
        with self.stopwatch.part("draft"):
            draft_logits = self.candidates.draft_logits(self.plan.depth)
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
            for index, item in enumerate(self.items):
                self.recorder.add_scores(item, index, paths[index], scores, logits)
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
        """Choose a token at every slot and accept; also the processed scores and, if they were asked for, raw logits."""
        choices, scores, raw_logits = self.choose(logits, tree)
        return (plain_step(choices) if tree is None else accept(tree, choices)), scores, raw_logits

    def choose(
        self, logits: torch.Tensor, tree: TokenTree | None
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor | None]:
        """The target's choices `(batch, slots)`; also the processed scores and, if they were asked for, raw logits."""
        logits = logits.to(device=self.sequences.device, dtype=torch.float32)
        raw_logits = logits.clone() if self.recorder.logits is not None else None
        return *self._choices(logits, tree), raw_logits

    def _choices(self, logits: torch.Tensor, tree: TokenTree | None) -> tuple[torch.LongTensor, torch.Tensor]:
        """The choices and processed scores of [`choose`], from logits in float32."""
        if self.processes_in_bulk:
            scores = process_everywhere(logits, self.processors)
            return self.choice.everywhere(scores, tree), scores
        walked = logits, self.process_item, self.choice, self.items, self.sequences, tree
        return choose_along_the_path(*walked, self.stop.is_known_end)

    def _choice(self) -> LikeliestToken:
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

    def _prompt_lookup(self) -> PromptLookup | None:
        """What looks the text up for the rounds' trees, if the call wants that and has trees."""
        settings = self.settings
        if not settings.prompt_lookup_num_tokens or not settings.tree_budget or self.reader.is_hybrid:
            return None
        return PromptLookup(settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size or MATCHING_NGRAM_SIZE)

    def _chooses_in_plain_order(self) -> bool:
        """Whether tokens are chosen one by one, each for all items: then other users of random numbers may come between."""
        return self.batch == 1 and not self.processes_in_bulk

    def cut(self, new_tokens: list[list[int]]) -> list[int]:
        """Append the new tokens of each item, up to those at which generation stops; returns how many each item got."""
        texts, recorder, counts = self.sequences, self.recorder, []
        before = list(texts.lengths)
        texts.append(new_tokens)
        for index, item in enumerate(self.items):
            of_item = partial(texts.item, index), partial(recorder.scores_of, item)
            counts.append(self.stop.cut(item, before[index], new_tokens[index], *of_item))
        for index, item in enumerate(self.items):
            texts.remove(index, len(new_tokens[index]) - counts[index])
            recorder.keep_first(item, texts.lengths[index] - self.prompt_length)
        if self.streamer is not None:
            with torch.inference_mode(False):
                # As plain `generate` puts a step's tokens: what counts or decodes them takes each for itself.
                self.streamer.put(torch.tensor(new_tokens[0][: counts[0]]))
        return counts

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

    def _lay_out_prompt(self, input_ids: torch.LongTensor) -> None:
        """Set out what the target and the drafter have to read, and what an earlier call's cache spares the target."""
        prompt = prompt_without_padding(input_ids, self.model_kwargs)
        types = prompt.extra.get(TOKEN_TYPES)
        if types is not None and not self.inputs.types_in_first:
            del prompt.extra[TOKEN_TYPES]
        if types is not None and self.inputs.types_in_others:
            self.reader.token_types = types[:, -1:]
        self.prompt_text, self.columns = prompt.text, prompt.columns
        text = prompt.text
        self.candidates.observe(DraftInputs(text.ids, text.positions, new_counts=text.counts))
        if self.judge.lookup is not None:
            columns = last_columns(text.counts, *text.ids.shape)
            self.judge.lookup.begin([ids[own[0] :] for ids, own in zip(text.ids.tolist(), columns, strict=True)])
        if self.inputs.rope.any:
            # A batch is rotated by its longest text, and of that padding is no part.
            longest = longest_text(self.model_kwargs.get("position_ids"), self.prompt_length)
            self.columns_before = self.prompt_length - longest
        given = self.model_kwargs["past_key_values"]
        self.num_cached_columns = int(given.get_seq_length())
        if self.inputs.rereads(self.prompt_length, self.num_cached_columns):
            self.num_cached_columns = 0
        if self.num_cached_columns:
            cached = range(self.num_cached_columns)
            real = torch.zeros(len(self.columns), self.num_cached_columns, dtype=torch.bool)
            for item, columns in enumerate(self.columns):
                real[item, [column for column in columns if column in cached]] = True
            self.reader.cache.import_from(given, real)
            prompt = prompt.after(real.sum(dim=1).tolist())
        self.prompt: Prompt | None = prompt
        self.pending = prompt.text

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

    def ends_of_items(self) -> torch.LongTensor:
        """`(batch, 1)`, the last position that is read of each item's text, if that grows as long as it may."""
        return self.prompt_text.positions[:, -1:] + self.candidates.max_length - self.prompt_length - 1

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

    def _catch_up(self) -> None:
        """Let the target read again what it had to forget, so that its cache is that of the text."""
        if self.pending.num_reread:
            after = PendingTokens(self.pending.ids[:, :-1], self.pending.positions[:, :-1])
            start = self.reader.cache.get_seq_length()
            self.reader.read(after, None)
            self.reader.keep(start, after, [[]])

    def _plan(self) -> Plan:
        """What to draft in this round."""
        if self.reader.is_hybrid and self.pending.num_reread:
            return NOTHING
        reads_text = self._reads_text
        room = self._room(self.schedule.deepest) if not reads_text or self._drafts_after_a_prompt() else 0
        plan = self.schedule.next_plan(len(self.items), room)
        # A drafter that was left out for long has more to read than in other rounds.
        has_caught_up = plan.depth == 0 or self.candidates.num_pending <= self.schedule.deepest + 1
        self.is_ordinary, self.is_unique = has_caught_up and not reads_text, reads_text
        return plan

    @property
    def _reads_text(self) -> bool:
        """Whether the target has more to read than each item's last token: the prompt, or a text again."""
        return self.prompt is not None or self.pending.ids.shape[1] > 1

    def _room(self, depth: int) -> int:
        """How many of `depth` tokens are worth drafting."""
        depth = self.stop.room(min(self.sequences.lengths), depth)
        if self.inputs.rope.any:
            # Items of a batch advance together where the text of one may come to stand beyond a change.
            depth = self.inputs.rope.room(max(self.sequences.lengths) - self.columns_before, depth)
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
        tree = self.judge.worth_reading_alone(self.plan, room, self.sequences.device) if room else None
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
        return self._judged(
            self.search.tree(draft_logits, self.sequences, self.plan.budget, self.token_ids), draft_logits
        )

    def _judged(self, tree: TokenTree, draft_logits: torch.Tensor) -> TokenTree | None:
        """What is worth reading of the tree in logits `(batch, depth, columns)`, and of what the texts suggest."""
        self.judge.remember_chain(draft_logits, self.token_ids)
        return self.judge.worth_reading(tree, draft_logits, self.token_ids, self._room_for_matches())

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
        """What a round says of an item's draft, see [`Acceptance.note`], of whose chosen tokens `count` were committed."""
        if count < num_chosen:
            # The text ended in accepted tokens.
            return count, count
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

    def _record_states(self, outputs: Any, start: int, nodes: list[list[int]]) -> None:
        """Hand this round's hidden states and attentions to the recorder."""
        if not self.recorder.takes_states:
            return
        length, is_first = self.pending.ids.shape[1], self.candidates.stats.rounds == 1
        read = last_columns(self.pending.counts, len(self.items), length)
        for index, item in enumerate(self.items):
            num_reread = self.pending.num_reread
            num_past = num_reread + (self.reader.cache.item_lengths or [start] * len(self.items))[index]
            places = self._places(item, self.sequences.lengths[index])
            first_place = self.num_cached_columns if is_first else places[num_past]
            read_nodes = [length + node for node in nodes[index]]
            dropped = self.reader.cache.dropped(index)
            self.recorder.add_states(
                outputs,
                ItemRead(item, index, num_past, read[index][num_reread:], read_nodes, dropped, places, first_place),
            )

    def _places(self, item: int, length: int) -> list[int]:
        """Where, in the caller's layout, the tokens of an item's text of `length` columns stand, padding left out."""
        return [*self.columns[item], *range(self.prompt_length, length)]

    def _drop_finished_items(self) -> None:
        """Set finished items aside, and go on with the others."""
        over = self._are_over()
        if not any(over):
            return
        if self._returns_cache():
            self._catch_up()
        for index, item in enumerate(self.items):
            if over[index]:
                entries = self.entries_of(index) if self._returns_cache() else None
                self.finished.add(item, self.sequences.item(index), entries)
        kept = [index for index, is_over in enumerate(over) if not is_over]
        self.items = [self.items[index] for index in kept]
        if self.items:
            self.sequences.select_items(kept)
            self.choice.select_items(kept)
            self.judge.select_items(kept)
            self.select_items(kept)

    def _are_over(self) -> list[bool]:
        """Which items leave the batch."""
        return self.stop.over(self.items, self.sequences.lengths)

    def entries_of(self, index: int) -> Entries:
        """The cache entries of an item."""
        return self.reader.cache.entries_of(index)

    def select_items(self, kept: list[int]) -> None:
        """Go on with only some items of the batch."""
        self.reader.select_items(kept)
        self.candidates.select_items(kept)
        self.pending = PendingTokens(self.pending.ids[kept], self.pending.positions[kept])

    def _returns_cache(self) -> bool:
        """Whether anybody will see the cache."""
        return self.recorder.enabled or is_callers(self.model_kwargs["past_key_values"])

    def _rest_is_like_plain(self) -> bool:
        """Whether plain `generate` would write, after the texts as they are now, what this loop does."""
        everybody_goes_on = self.items == list(range(self.batch)) and not any(self.stop.end_of_item)
        # Texts that are ahead of others are cut; what a layer with a window has dropped does not come back.
        lengths = self.sequences.lengths
        dropped = (self.reader.cache.dropped(index) for index in range(len(self.items)))
        can_be_cut = max(lengths) == min(lengths) or not any(map(any, dropped))
        sees_scores = self.recorder.scores is not None and self.stop.others
        return (
            self.rest.is_possible
            and self.inputs == SLICED_INPUTS
            and self.prompt is None
            and everybody_goes_on
            and can_be_cut
            and not sees_scores
        )

    def _set_texts_aside(self) -> None:
        """Make of all texts what plain `generate` can go on with: they are cut to the shortest."""
        self._catch_up()
        lengths = self.sequences.lengths
        self.rest_from = min(lengths)
        self.choice.finish(self.rest_from - self.prompt_length)
        self.candidates.stats.take_back([length - self.rest_from for length in lengths])
        for item in self.items:
            self.recorder.keep_first(item, self.rest_from - self.prompt_length)
            self.finished.add(item, self.sequences.item(item), self.entries_of(item))

    def _leave_rest(self) -> Any:
        """Let plain `generate` write what is left; returns what `generate` returns."""
        given, num_new = self.model_kwargs["past_key_values"], self.rest_from - self.prompt_length
        self.finished.fill(given, self.reader.cache, self.columns, self.prompt_length, self.rest_from)
        # From here on only the caller's cache is read.
        self.finished.entries.clear()
        self.reader.forget_all()
        self.candidates.state = None
        num_rounds = self.candidates.stats.rounds
        rest = self.rest.write(self.finished.text(self.rest_from), num_new, self.candidates.stats)
        self.schedule.note_plain(self.candidates.stats.rounds - num_rounds)
        if isinstance(rest, torch.Tensor):
            return rest
        self.recorder.add_rest(rest)
        return self.recorder.result(rest.sequences, rest.sequences.shape[1] - self.prompt_length, rest.past_key_values)

    def _result(self, text: torch.LongTensor) -> Any:
        """What `generate` returns, items in the caller's order; its cache is the kind that plain `generate` leaves."""
        length, cache = self.stop.common_length(), None
        if self._returns_cache():
            missing = self.finished.missing(self.prompt_length, length)
            if any(missing):
                last = self.prompt_text.positions[:, -1:] + length - self.prompt_length - 1
                lengths = self.finished.lengths_read(self.columns, self.prompt_length)
                self.finished.entries = self.reader.read_missing(self.finished, lengths, missing, last)
            given = self.model_kwargs["past_key_values"]
            cache = self.finished.fill(given, self.reader.cache, self.columns, self.prompt_length, length)
        return self.recorder.result(text, text.shape[1] - self.prompt_length, cache)
