"""One generate call around its rounds: from the prompt that `generate` was given to what it returns."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..models.inputs import DraftInputs, last_columns
from .candidate_generator import ParallelCandidateGenerator
from .choosing.choice import TokenChoice
from .draft_judge import DraftJudge
from .finished import FinishedItems
from .inference_mode import mode_for
from .outputs import ItemRead, OutputRecorder
from .packing.fast_attention import fast_attention
from .packing.fused_norms import fused_norms
from .packing.packed_layers import packed_layers
from .plain import PlainRest, new_ids_of
from .scheduling.fixed import FixedSchedule
from .scheduling.schedule import Schedule
from .sequences import TokenBuffer, filling_gaps
from .stopping import StopChecks
from .target_side.cache import Entries
from .target_side.callers_cache import is_callers, window_in
from .target_side.prompt import TOKEN_TYPES, PendingTokens, Prompt, prompt_without_padding
from .target_side.reader import TargetReader
from .target_side.rope import longest_text
from .target_side.step_inputs import SLICED_INPUTS, StepInputs
from .target_side.structure import attended_layers, text_config_of


class DecodingCall(ABC):
    """One generate call of a target with a drafter; see [`run`]. What a round does is said by [`SpeculativeDecoding`].

    The items of a batch go their own ways: each commits what it accepts, and leaves the batch when it is over. `items` says
    which of the caller's items are still there; everything of a round has its items in that order.

    Args:
        target: the model whose text is written.
        candidates: the drafter's side.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as `generate` prepared them.
        schedule: what each round drafts and verifies.
        batch: number of items.
        inputs: what plain `generate` would give the target in each step, see [`step_inputs`].

    Attributes:
        sequences: the texts of the items that go on.
        pending: the tokens of each that the target has not read: its last one, or more.
        prompt: what the target has to read in the first round; `None` afterwards.
        choice: how tokens are chosen.
        judge: of drafts, and of what the texts suggest.
        finished: the texts of the other items.
    """

    judge: DraftJudge

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
        self.candidates, self.schedule, self.inputs = candidates, schedule, inputs
        self.batch, self.items = batch, list(range(batch))
        self.stop = StopChecks(stopping_criteria, batch)
        self.streamer, self.model_kwargs = streamer, model_kwargs
        # Until rounds begin, none.
        self.choice = TokenChoice()
        padding = generation_config._pad_token_tensor
        self.finished = FinishedItems(0 if padding is None else int(padding))
        text_config = text_config_of(target)
        cache = model_kwargs["past_key_values"]
        windows = [window_in(cache, source) for source in attended_layers(text_config)]
        self.recorder = OutputRecorder(generation_config, batch, windows)
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
        self.mode = mode_for(target, generation_config, logits_processor, stopping_criteria, cache, candidates.drafter)
        # Whose forwards a round runs.
        self.models = target, candidates.drafter, *candidates.gathered_heads()
        self.packing = packed_layers(*self.models, wanted=candidates.settings.pack_weights)
        self.fusing, self.attending = fused_norms(*self.models), fast_attention(target)

    def run(self, input_ids: torch.LongTensor) -> Any:
        """Continue `input_ids (batch, length)`; returns what `generate` returns."""
        with self.packing, self.fusing, self.attending:
            try:
                with self.mode:
                    self._write(input_ids)
                length = self.rest_from if self.items else self.stop.common_length()
                self.choice.finish(length - self.prompt_length)
            finally:
                # Before plain `generate` draws, and before whoever waits for the end of the stream seeds the generator anew.
                self.choice.close()
            if self.items:
                return self._leave_rest()
            self.schedule.end_call(length - self.prompt_length)
            if self.streamer is not None:
                self.streamer.end()
            return self._result(length)

    def _write(self, input_ids: torch.LongTensor) -> None:
        """Rounds, until all texts are over or plain `generate` is to write the rest."""
        self.prompt_length = input_ids.shape[1]
        self.sequences = TokenBuffer(input_ids)
        self._lay_out_prompt(input_ids)
        self.begin()
        while self.items and not (self.schedule.leaves_rest_to_plain() and self._rest_is_like_plain()):
            self.round()
        self.end()
        if self.items:
            self._set_texts_aside()

    @abstractmethod
    def begin(self) -> None:
        """Get ready for rounds: the prompt is laid out."""

    @abstractmethod
    def round(self) -> None:
        """Commit some tokens to each item."""

    @abstractmethod
    def end(self) -> None:
        """There are no more rounds."""

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
                self.streamer.put(torch.tensor(new_tokens[0][: counts[0]], device="cpu"))
        return counts

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
        if self.inputs.counts_tokens:
            # A batch is rotated by its longest text, and of that padding is no part.
            longest = longest_text(self.model_kwargs.get("position_ids"), self.prompt_length)
            self.columns_before = self.prompt_length - longest
        given = self.model_kwargs["past_key_values"]
        self.num_cached_columns = int(given.get_seq_length())
        if self.inputs.rereads(self.prompt_length, self.num_cached_columns):
            self.num_cached_columns = 0
        if self.num_cached_columns:
            cached = range(self.num_cached_columns)
            real = torch.zeros(len(self.columns), self.num_cached_columns, dtype=torch.bool, device="cpu")
            for item, columns in enumerate(self.columns):
                real[item, [column for column in columns if column in cached]] = True
            self.reader.cache.import_from(given, real)
            prompt = prompt.after(real.sum(dim=1).tolist())
        self.prompt: Prompt | None = prompt
        self.pending = prompt.text

    def ends_of_items(self) -> torch.LongTensor:
        """`(batch, 1)`, the last position that is read of each item's text, if that grows as long as it may."""
        return self.prompt_text.positions[:, -1:] + self.candidates.max_length - self.prompt_length - 1

    def _catch_up(self) -> None:
        """Let the target read again what it had to forget, so that its cache is that of the text."""
        if self.pending.num_reread:
            after = PendingTokens(self.pending.ids[:, :-1], self.pending.positions[:, :-1])
            start = self.reader.cache.get_seq_length()
            self.reader.read(after, None)
            self.reader.keep(start, after, [[]])

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
        kept = filling_gaps(over)
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
        if self.judge.lookup is not None and self.schedule.looks_back:
            self.judge.look_back(new_ids_of(rest, self.rest_from)[0].tolist())
        if isinstance(rest, torch.Tensor):
            return rest
        self.recorder.add_rest(rest)
        return self.recorder.result(rest.sequences, rest.sequences.shape[1] - self.prompt_length, rest.past_key_values)

    def _result(self, length: int) -> Any:
        """What `generate` returns: texts of `length` columns in the caller's order, and a cache as plain `generate` leaves it."""
        cache = None
        if self._returns_cache():
            missing = self.finished.missing(self.prompt_length, length)
            if any(missing):
                last = self.prompt_text.positions[:, -1:] + length - self.prompt_length - 1
                lengths = self.finished.lengths_read(self.columns, self.prompt_length)
                self.finished.entries = self.reader.read_missing(self.finished, lengths, missing, last)
            given = self.model_kwargs["past_key_values"]
            cache = self.finished.fill(given, self.reader.cache, self.columns, self.prompt_length, length)
        return self.recorder.result(self.finished.text(length), length - self.prompt_length, cache)
