"""The loop: draft, verify, commit, until generation is over. One host synchronisation a round."""

from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.streamers import BaseStreamer

from ..models.inputs import DraftInputs, cached_arange, last_columns
from .adaptive_depth import DepthSchedule
from .cache import Entries, Snapshot, attended_layers
from .candidate_generator import ParallelCandidateGenerator
from .finished import FinishedRows
from .host import paths_on_host
from .outputs import OutputRecorder, RowRead
from .pending import TOKEN_TYPES, Prompt, Unread, read_prompt
from .rope import longest_text
from .sampling import (
    DrawnChain,
    ItemProcessors,
    choose_along_the_path,
    choose_everywhere,
    draw_chain,
    is_prefix_free,
)
from .sequences import Texts
from .stats import Proposal, Stopwatch, synchronizer
from .step_inputs import SLICED_INPUTS, StepInputs
from .stopping import StopChecks
from .target_forward import TargetReader
from .tree.token_tree import TokenTree, chain_tree, draft_chain
from .tree.verify import Acceptance, accept, plain_step
from .tree_growth import TreeSearch


class SpeculativeDecoding:
    """One generate call of a target with a drafter; see [`run`].

    Rows of the batch go their own ways: each commits what it accepts, and leaves the batch when it is over. `rows` says
    which of the caller's rows are still there; everything of a round has its rows in that order.

    Args:
        target: the model whose text is written.
        candidates: the drafter's side.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as `generate` prepared them.
        batch: number of rows.
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
        batch: int = 1,
        inputs: StepInputs = SLICED_INPUTS,
    ) -> None:
        self.candidates = candidates
        self.settings = candidates.settings
        self.search = TreeSearch(self.settings, candidates.drafter, generation_config._eos_token_tensor)
        self.processors = logits_processor
        self.process_item = ItemProcessors(logits_processor, batch)
        self.processes_in_bulk = is_prefix_free(logits_processor)
        self.do_sample = bool(generation_config.do_sample)
        self.stop = StopChecks(stopping_criteria, batch)
        self.streamer = streamer
        padding = generation_config._pad_token_tensor
        self.finished = FinishedRows(0 if padding is None else int(padding))
        text_config = target.config.get_text_config(decoder=True)
        self.inputs = inputs
        layer_kwargs = get_layer_types_and_kwargs(text_config)[1]
        windows = [layer_kwargs[source].get("sliding_window") for source in attended_layers(text_config)]
        self.recorder = OutputRecorder(generation_config, batch, windows)
        self.model_kwargs = model_kwargs
        requested = dict(candidates.model_kwargs_overrides)
        if self.recorder.hidden_states is not None:
            requested["output_hidden_states"] = True
        if self.recorder.attentions is not None:
            requested["output_attentions"] = True
        self.reader = TargetReader(target, model_kwargs, requested)
        self.schedule = DepthSchedule(candidates.depth, self.settings.adaptive_depth)
        self.stopwatch = Stopwatch(candidates.stats, self.settings.time_rounds, synchronizer(target.device))
        self.rows = list(range(batch))

    def run(self, input_ids: torch.LongTensor) -> Any:
        """Continue `input_ids (batch, length)`; returns what `generate` returns."""
        self.prompt_length = input_ids.shape[1]
        self.texts = Texts(input_ids)
        self._read_prompt(input_ids)
        while self.rows:
            self.round()
        if self.streamer is not None:
            self.streamer.end()
        return self._result()

    def round(self) -> None:
        """Draft, read, verify and commit once."""
        if self.prompt is None and self.inputs.rereads(self.texts.lengths[0]):
            self._read_all_again()
        with self.stopwatch.part("draft"):
            draft_logits = self.candidates.draft_logits(self._depth())
        with self.stopwatch.part("tree"):
            tree, drawn = self._proposal(draft_logits)
        with self.stopwatch.part("verify"):
            start, root = self.reader.cache.get_seq_length(), self.unread
            snapshot = self.reader.cache.snapshot() if self.reader.is_hybrid and tree is not None else None
            outputs = self._read(tree)
            acceptance, scores, logits = self.verify(outputs.logits, tree, drawn)
            paths, new_tokens = paths_on_host(acceptance)
        with self.stopwatch.part("commit"):
            for index, row in enumerate(self.rows):
                self.recorder.add_scores(row, index, paths[index], scores, logits)
            counts = self.cut(new_tokens)
            self._note(tree, paths, counts)
            paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
            self.commit(outputs, start, paths, acceptance.tokens)
            if snapshot is not None and counts[0] <= tree.num_nodes:
                self._forget_rejected(snapshot, start, root, counts[0])
            self._drop_finished_rows()

    def verify(
        self, logits: torch.Tensor, tree: TokenTree | None, drawn: DrawnChain | None
    ) -> tuple[Acceptance, torch.Tensor, torch.Tensor | None]:
        """Choose a token at every slot and accept; also the processed scores and, if they were asked for, raw logits."""
        choices, scores, raw_logits = self.choose(logits, tree, drawn)
        return (plain_step(choices) if tree is None else accept(tree, choices)), scores, raw_logits

    def choose(
        self, logits: torch.Tensor, tree: TokenTree | None, drawn: DrawnChain | None
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor | None]:
        """The target's choices `(batch, slots)`; also the processed scores and, if they were asked for, raw logits."""
        logits = logits.to(device=self.texts.device, dtype=torch.float32)
        raw_logits = logits.clone() if self.recorder.logits is not None else None
        return *self._choices(logits, tree, drawn), raw_logits

    def _choices(
        self, logits: torch.Tensor, tree: TokenTree | None, drawn: DrawnChain | None
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        """The choices and processed scores of [`choose`], from logits in float32."""
        if self.processes_in_bulk:
            return choose_everywhere(logits, self.processors, self.do_sample, self.texts.ids, drawn)
        return choose_along_the_path(logits, self.process_item, self.do_sample, self.rows, self.texts, tree, drawn)

    def cut(self, new_tokens: list[list[int]]) -> list[int]:
        """Append the new tokens of each row, up to those at which generation stops; returns how many each row got."""
        texts, recorder, counts = self.texts, self.recorder, []
        before = list(texts.lengths)
        texts.append(new_tokens)
        for index, row in enumerate(self.rows):
            of_row = partial(texts.row, index), partial(recorder.scores_of, row)
            counts.append(self.stop.cut(row, before[index], new_tokens[index], *of_row))
        for index, row in enumerate(self.rows):
            texts.remove(index, len(new_tokens[index]) - counts[index])
            recorder.keep_first(row, texts.lengths[index] - self.prompt_length)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([new_tokens[0][: counts[0]]]))
        return counts

    def commit(self, outputs: Any, start: int, paths: list[list[int]], tokens: torch.LongTensor) -> None:
        """Keep the accepted part of the cache, and tell the drafter what is new.

        Args:
            outputs: of the target's forward.
            start: cache columns before it.
            paths: for each row, the slots that were read and kept, the root's first; its text has grown by as many tokens.
            tokens: `(batch, most)`, these tokens, and anything behind them.
        """
        # The bonus token was chosen, not read, so the cache is one entry short of the text.
        nodes = [[slot - 1 for slot in path[1:]] for path in paths]
        self._record_states(outputs, start, nodes)
        self.reader.keep(start, self.unread, nodes)
        counts = [len(path) for path in paths]
        most, device = max(counts), self.texts.device
        uneven = None if min(counts) == most else counts
        ahead = cached_arange(1, most + 1, device)
        if uneven is None:
            new_ids = tokens[:, :most]
        else:
            # What stands before the new tokens of a row that got fewer is meaningless, but such as exist.
            ahead = ahead - (most - torch.tensor(counts, device=device)[:, None])
            new_ids = tokens.gather(1, (ahead - 1).clamp(min=0))
        new_positions = self.unread.root_positions + ahead
        context = DraftInputs(new_ids, new_positions, new_counts=uneven)
        if self.candidates.taps:
            self._add_features(context, outputs, nodes)
        self.candidates.observe(context)
        self.unread = Unread(new_ids[:, -1:], new_positions[:, -1:])

    def _read_prompt(self, input_ids: torch.LongTensor) -> None:
        """Set out what the target and the drafter have to read, and what an earlier call's cache spares the target."""
        prompt = read_prompt(input_ids, self.model_kwargs)
        types = prompt.extra.get(TOKEN_TYPES)
        if types is not None and not self.inputs.types_in_first:
            del prompt.extra[TOKEN_TYPES]
        if types is not None and self.inputs.types_in_others:
            self.reader.token_types = types[:, -1:]
        self.prompt_text, self.columns = prompt.text, prompt.columns
        text = prompt.text
        self.candidates.observe(DraftInputs(text.ids, text.positions, new_counts=text.counts))
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
            for row, columns in enumerate(self.columns):
                real[row, [column for column in columns if column in cached]] = True
            self.reader.cache.import_from(given, real)
            prompt = prompt.after(real.sum(dim=1).tolist())
        self.prompt: Prompt | None = prompt
        self.unread = prompt.text

    def _read(self, tree: TokenTree | None) -> Any:
        """The target's forward of this round."""
        if self.prompt is None:
            return self.reader.read(self.unread, tree)
        prompt, self.prompt = self.prompt, None
        return self.reader.read_prompt(prompt, tree)

    def _read_all_again(self) -> None:
        """Forget what was read of all texts, since plain `generate` reads them again from here. They have one length."""
        self.reader.forget_all()
        text, num_new = self.prompt_text, self.texts.lengths[0] - self.prompt_length
        ahead = torch.arange(1, num_new + 1, device=text.positions.device)
        ids = torch.cat([text.ids, self.texts.last(num_new)], dim=1)
        positions = torch.cat([text.positions, text.positions[:, -1:] + ahead], dim=1)
        counts = text.counts and [count + num_new for count in text.counts]
        self.unread = Unread(ids, positions, counts, num_reread=ids.shape[1] - 1)

    def _forget_rejected(self, snapshot: Snapshot, start: int, root: Unread, num_new: int) -> None:
        """Go back to before this round where rejected tokens can't be removed: the next round reads the accepted ones again.

        It then drafts nothing, so that the state behind them is never mixed with that of a draft. Batch 1.
        """
        self.reader.cache.restore(snapshot)
        self.reader.cache.forget_from(start)
        ids = torch.cat([root.ids, self.texts.last(num_new)], dim=1)
        positions = root.positions + torch.arange(num_new + 1, device=ids.device)
        self.unread = Unread(ids, positions, num_reread=num_new)

    def _catch_up(self) -> None:
        """Let the target read again what it had to forget, so that its cache is that of the text."""
        if self.unread.num_reread:
            behind = Unread(self.unread.ids[:, :-1], self.unread.positions[:, :-1])
            start = self.reader.cache.get_seq_length()
            self.reader.read(behind, None)
            self.reader.keep(start, behind, [[]])

    def _depth(self) -> int:
        """How many tokens to draft in this round."""
        if (self.prompt or self.unread.ids.shape[1] > 1) and not self._drafts_behind_a_prompt():
            return 0
        depth = self.stop.room(min(self.texts.lengths), self.schedule.next_depth())
        if self.inputs.rope.any:
            # Items of a batch advance together where the text of one may come to stand beyond a change.
            depth = self.inputs.rope.room(max(self.texts.lengths) - self.columns_before, depth)
        return self.inputs.room(max(self.texts.lengths), depth)

    def _drafts_behind_a_prompt(self) -> bool:
        """Whether the target can read a draft together with a longer text.

        Several rows are read with the target's own mask, which has no room for drafts. A snapshot has to be of the state
        behind all that is committed. And an image's tokens are counted by the target.
        """
        return len(self.rows) == 1 and not self.reader.is_hybrid and not (self.prompt and self.prompt.extra)

    def _proposal(self, draft_logits: torch.Tensor | None) -> tuple[TokenTree | None, DrawnChain | None]:
        """What to propose, from marginal logits `(batch, depth, vocab)`; and the law that it was drawn from, if it was."""
        if draft_logits is None:
            return None, None
        draft_logits, settings = draft_logits.to(self.texts.device), self.settings
        if self.do_sample and settings.verification == "rejection":
            drawn = draw_chain(draft_logits, self.processors, self.texts.ids)
            return chain_tree(drawn.tokens), drawn
        # A text is read with the target's own mask, which has no room for branches.
        reads_text = self.prompt or self.unread.ids.shape[1] > 1
        if settings.tree_budget and not reads_text and not self.reader.is_hybrid:
            return self.search.tree(draft_logits, self.texts), None
        return draft_chain(draft_logits), None

    def _note(self, tree: TokenTree | None, paths: list[list[int]], counts: list[int]) -> None:
        """Tell the statistics and the depth schedule how the round went."""
        num_drafted, items = tree.num_nodes if tree else 0, self._noted_items()
        accepted = [min(len(path) - 1, count) for path, count in zip(paths, counts, strict=True)]
        noted = [accepted[item] for item in items]
        self.candidates.stats.add_round([num_drafted] * len(items), noted, [counts[item] for item in items])
        if tree is not None and self.settings.record_drafts:
            self._record(tree, accepted, counts)
        if tree is not None:
            self.schedule.note(sum(noted) / len(noted))

    def _noted_items(self) -> list[int]:
        """The items of the batch whose text this round was about."""
        return list(range(len(self.rows)))

    def _record(self, tree: TokenTree, accepted: list[int], counts: list[int]) -> None:
        """Note what was proposed to each row."""
        all_tokens, all_depths = tree.tokens.tolist(), tree.depths.tolist()
        for index in self._noted_items():
            tokens, depths = all_tokens[index], all_depths[index]
            num_before = self.texts.lengths[index] - counts[index] - self.prompt_length
            self.candidates.stats.proposals.append(
                Proposal(self.rows[index], num_before, tuple(tokens), tuple(depths), accepted[index], counts[index])
            )

    def _add_features(self, context: DraftInputs, outputs: Any, nodes: list[list[int]]) -> None:
        """Add the tapped states of what the target has just read, and where it stands."""
        length, num_reread = self.unread.ids.shape[1], self.unread.num_reread
        if len(nodes) == 1 and nodes[0] == list(range(len(nodes[0]))):
            rows = slice(num_reread, length + len(nodes[0]))
            positions = self.reader.positions[:, rows]
        else:
            read = last_columns(self.unread.counts, len(nodes), length)
            kept = [
                [column for column in row if column >= num_reread] + [length + node for node in chosen]
                for row, chosen in zip(read, nodes, strict=True)
            ]
            counts, most = list(map(len, kept)), max(map(len, kept))
            context.feature_counts = None if min(counts) == most else counts
            rows = torch.tensor([row[:1] * (most - len(row)) + row for row in kept])
            # What is read ends one place before the newest token. A prompt has positions of its own.
            last = context.new_positions[:, -1:]
            is_prompt = length - num_reread > 1
            positions = self.unread.positions if is_prompt else last + cached_arange(-most, 0, last.device)
        context.features = self.candidates.tapped(outputs.hidden_states, rows)
        context.feature_positions = positions

    def _record_states(self, outputs: Any, start: int, nodes: list[list[int]]) -> None:
        """Hand this round's hidden states and attentions to the recorder."""
        if not self.recorder.takes_states:
            return
        length, is_first = self.unread.ids.shape[1], self.candidates.stats.rounds == 1
        read = last_columns(self.unread.counts, len(self.rows), length)
        for index, row in enumerate(self.rows):
            num_reread = self.unread.num_reread
            num_past = num_reread + (self.reader.cache.row_lengths or [start] * len(self.rows))[index]
            places = self._places(row, self.texts.lengths[index])
            first_place = self.num_cached_columns if is_first else places[num_past]
            read_nodes = [length + node for node in nodes[index]]
            dropped = self.reader.cache.dropped(index)
            self.recorder.add_states(
                outputs,
                RowRead(row, index, num_past, read[index][num_reread:], read_nodes, dropped, places, first_place),
            )

    def _places(self, row: int, length: int) -> list[int]:
        """Where, in the caller's layout, the tokens of a row's text of `length` columns stand, padding left out."""
        return [*self.columns[row], *range(self.prompt_length, length)]

    def _drop_finished_rows(self) -> None:
        """Set finished rows aside, and go on with the others."""
        over = self._are_over()
        if not any(over):
            return
        if self._returns_cache():
            self._catch_up()
        for index, row in enumerate(self.rows):
            if over[index]:
                entries = self.entries_of(index) if self._returns_cache() else None
                self.finished.add(row, self.texts.row(index), entries)
        kept = [index for index, is_over in enumerate(over) if not is_over]
        self.rows = [self.rows[index] for index in kept]
        if self.rows:
            self.texts.select_rows(kept)
            self.select_rows(kept)

    def _are_over(self) -> list[bool]:
        """Which rows leave the batch."""
        return self.stop.over(self.rows, self.texts.lengths)

    def entries_of(self, index: int) -> Entries:
        """The cache entries of a row."""
        return self.reader.cache.entries_of(index)

    def select_rows(self, kept: list[int]) -> None:
        """Go on with only some rows of the batch."""
        self.reader.select_rows(kept)
        self.candidates.select_rows(kept)
        self.unread = Unread(self.unread.ids[kept], self.unread.positions[kept])

    def _read_missing(self, length: int) -> None:
        """Let the target read, for the cache, what plain `generate` lets it read of items that are over before others.

        Their last tokens are these, and padding up to the batch's last but one column.
        """
        finished, batch = self.finished, len(self.columns)
        missing = finished.missing(self.prompt_length, length)
        if not any(missing):
            return
        self.reader.select_all_rows()
        num_read = [finished.texts[item].shape[1] - self.prompt_length - 1 for item in range(batch)]
        lengths = [len(columns) + count for columns, count in zip(self.columns, num_read, strict=True)]
        self.reader.cache.hold([finished.entries[item] for item in range(batch)], lengths)
        counts, most = list(map(len, missing)), max(map(len, missing))
        ids = [[finished.padding] * (most - len(tokens)) + tokens for tokens in missing]
        last = self.prompt_text.positions[:, -1:]
        positions = last + torch.arange(
            length - self.prompt_length - most, length - self.prompt_length, device=last.device
        )
        unread = Unread(torch.tensor(ids, device=last.device), positions.clamp(min=0), counts)
        start = self.reader.cache.get_seq_length()
        self.reader.read(unread, None)
        self.reader.keep(start, unread, [[]] * batch)
        finished.entries = {item: self.reader.cache.entries_of(item) for item in range(batch)}

    def _returns_cache(self) -> bool:
        """Whether anybody will see the cache: generate marks one that the caller passed in, and so keeps."""
        return self.recorder.enabled or "_is_user_defined" in vars(self.model_kwargs["past_key_values"])

    def _result(self) -> Any:
        """What `generate` returns, rows in the caller's order; its cache is the kind that plain `generate` leaves."""
        length = self.stop.common_length()
        text, cache = self.finished.text(length), None
        if self._returns_cache():
            self._read_missing(length)
            given = self.model_kwargs["past_key_values"]
            cache = self.finished.fill(given, self.reader.cache, self.columns, self.prompt_length, length)
        return self.recorder.result(text, text.shape[1] - self.prompt_length, cache)
