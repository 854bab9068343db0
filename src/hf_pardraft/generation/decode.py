"""The loop: draft, verify, commit, until generation is over. One host synchronisation a round."""

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .candidates import ParallelCandidateGenerator
from .outputs import OutputRecorder
from .reading import Prompt, TargetReader, read_prompt
from .selection import choose_along_the_path, choose_everywhere, is_prefix_free
from .stats import Stopwatch
from .stopping import StopChecks
from .tree import TokenTree, draft_chain
from .verify import Acceptance, accept, plain_step


class SpeculativeDecoding:
    """One generate call of a target with a drafter; see [`run`].

    Args:
        target: the model whose text is written.
        candidates: the drafter's side.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as `generate` prepared them.
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
    ) -> None:
        self.candidates = candidates
        self.processors = logits_processor
        self.processes_in_bulk = is_prefix_free(logits_processor)
        self.do_sample = bool(generation_config.do_sample)
        self.stop = StopChecks(stopping_criteria)
        self.streamer = streamer
        self.recorder = OutputRecorder(generation_config)
        self.model_kwargs = model_kwargs
        requested = dict(candidates.model_kwargs_overrides)
        if self.recorder.hidden_states is not None:
            requested["output_hidden_states"] = True
        if self.recorder.attentions is not None:
            requested["output_attentions"] = True
        self.reader = TargetReader(target, model_kwargs, requested)
        self.stopwatch = Stopwatch(candidates.stats, candidates.settings.time_rounds, _synchronizer(target.device))

    def run(self, input_ids: torch.LongTensor) -> Any:
        """Continue `input_ids (1, length)`; returns what `generate` returns."""
        self.text = input_ids
        self.unread = read_prompt(input_ids, self.model_kwargs)
        self.candidates.observe(self.unread.ids, self.unread.positions)
        finished = False
        while not finished:
            finished = self.round()
        if self.streamer is not None:
            self.streamer.end()
        return self.recorder.result(self.text, self._returned_cache())

    def round(self) -> bool:
        """Draft, read, verify and commit once; say whether generation is over."""
        with self.stopwatch.part("draft"):
            depth = self.stop.room(self.text.shape[1], self.candidates.depth)
            draft_logits = self.candidates.draft_logits(depth)
        with self.stopwatch.part("tree"):
            tree = None if draft_logits is None else draft_chain(draft_logits.to(self.text.device))
        with self.stopwatch.part("verify"):
            num_before = self.reader.cache.get_seq_length()
            outputs = self.reader.read(self.unread, tree)
            acceptance, scores, logits = self.verify(outputs.logits, tree)
            path, new_tokens = path_on_host(acceptance)
        with self.stopwatch.part("commit"):
            self.recorder.add_scores(path, scores, logits)
            num_kept, finished = self.cut(new_tokens, acceptance)
            self.recorder.add_states(outputs, self.unread.ids.shape[1], num_before, num_kept)
            self.candidates.stats.add_round(tree.num_nodes if tree else 0, min(len(path) - 1, num_kept), num_kept)
            self.commit(outputs, num_before, path[:num_kept], finished)
        return finished

    def verify(
        self, logits: torch.Tensor, tree: TokenTree | None
    ) -> tuple[Acceptance, torch.Tensor, torch.Tensor | None]:
        """Choose a token at every slot and accept; also the processed scores and, if they were asked for, raw logits."""
        logits = logits.to(device=self.text.device, dtype=torch.float32)
        raw_logits = logits.clone() if self.recorder.logits is not None else None
        if self.processes_in_bulk:
            choices, scores = choose_everywhere(logits, self.processors, self.do_sample, self.text)
        else:
            choices, scores = choose_along_the_path(logits, self.processors, self.do_sample, self.text, tree)
        return (plain_step(choices) if tree is None else accept(tree, choices)), scores, raw_logits

    def cut(self, new_tokens: list[int], acceptance: Acceptance) -> tuple[int, bool]:
        """Append the new tokens up to the one at which generation stops; returns how many, and whether it is over."""
        longer = torch.cat([self.text, acceptance.tokens[:, : len(new_tokens)]], dim=1)
        num_kept, finished = self.stop.cut(longer, new_tokens, self.recorder.scores)
        num_dropped = len(new_tokens) - num_kept
        self.recorder.drop_last(num_dropped)
        self.text = longer[:, : longer.shape[1] - num_dropped]
        if self.streamer is not None:
            self.streamer.put(self.text[:, -num_kept:].cpu())
        return num_kept, finished

    def commit(self, outputs: Any, num_before: int, path: list[int], finished: bool) -> None:
        """Keep the accepted part of the cache, and tell the drafter what is new.

        Args:
            outputs: of the target's forward.
            num_before: cache entries before it.
            path: the slots that were read and kept, the root's first; the text has grown by as many tokens.
            finished: whether this was the last round.
        """
        num_unread, num_new = self.unread.ids.shape[1], len(path)
        # The bonus token was chosen, not read, so the cache is one entry short of the text.
        nodes = [slot - 1 for slot in path[1:]]
        self.reader.cache.keep_path(num_before + num_unread, nodes)
        new_ids = self.text[:, -num_new:]
        new_positions = self.unread.positions[:, -1:] + torch.arange(1, num_new + 1, device=new_ids.device)
        if not finished:
            features = (
                self.candidates.tapped(outputs.hidden_states, num_unread, nodes) if self.candidates.taps else None
            )
            read_positions = torch.cat([self.unread.positions, new_positions[:, :-1]], dim=1)
            self.candidates.observe(new_ids, new_positions, features, None if features is None else read_positions)
        self.unread = Prompt(new_ids[:, -1:], new_positions[:, -1:])

    def _returned_cache(self) -> Any:
        """The cache in the form that plain `generate` leaves it, if anybody will see it."""
        given = self.model_kwargs["past_key_values"]
        # generate marks a cache that the caller passed in, and so keeps.
        if not self.recorder.enabled and "_is_user_defined" not in vars(given):
            return None
        return self.reader.cache.export_to(given)


def path_on_host(acceptance: Acceptance) -> tuple[list[int], list[int]]:
    """The accepted slots, the root's first, and the tokens to commit (as many), in one transfer. Batch 1."""
    num_accepted, *rest = torch.cat([acceptance.num_accepted[:, None], acceptance.path, acceptance.tokens], 1)[
        0
    ].tolist()
    num_slots = len(rest) // 2
    return rest[: num_accepted + 1], rest[num_slots : num_slots + num_accepted + 1]


def _synchronizer(device: torch.device):
    """A function that waits for `device`, for timing."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
