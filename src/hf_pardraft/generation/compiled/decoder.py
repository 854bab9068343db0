"""The loop with compiled rounds: the same steps and the same text, by step functions whose shapes are the same in every round.

A call's first rounds, which read the prompt, run as ever. Then everything moves into tensors of a fixed capacity, and what a
round has to say goes from step to step on the device.
"""

from contextlib import nullcontext
from typing import Any

import torch
from transformers import CompileConfig

from ...likeliest import likeliest
from ...models.inputs import DraftInputs
from ..choosing.choice import RejectionSampling
from ..decoder import SpeculativeDecoding
from ..packing.packed_layers import PackedProducts
from ..packing.packed_weights import forget, forget_changed, forget_slower
from ..settings import DraftSettings
from ..target_side.cache import Entries
from ..target_side.structure import parameters_of
from ..tree.columns import tokens_of
from ..tree.token_tree import TokenTree, chain_tree, items_of_tree, number_of_levels
from ..tree.verify import NO_NODE, paths_of
from . import steps
from .compiler import Compiler
from .static_cache import contiguous_copy, to_static_cache, to_static_inputs, with_room
from .steps import DecodeState, Draft, DrafterSide, TargetSide, first_decode_state

# What the loop says in every forward itself.
OWN_ARGUMENTS = {"past_key_values", "use_cache", "return_dict"}


class CompiledDecoding(SpeculativeDecoding):
    """[`SpeculativeDecoding`], compiled.

    Batch items that are over stay in the batch, so that its shape doesn't change, but they don't grow any more. `items` leaves
    them out, and `live` says where in the batch the others are.

    Args:
        target: the model whose text is written.
        compile_config: how to compile.
        **arguments: the others of [`SpeculativeDecoding`].
    """

    def __init__(self, target, *, compile_config: CompileConfig | None, **arguments: Any) -> None:
        super().__init__(target, **arguments)
        self.target, self.drafter = target, self.candidates.drafter
        # What the host would look up, an accelerator would wait for.
        if target.device.type != "cpu":
            self.judge.lookup = None
        # What is compiled is guarded by the mode and the layers that it was compiled with.
        self.mode = self.packing = self.fusing = nullcontext()
        self.packs = packs_weights(target.device, self.settings)
        # The first forwards are not compiled.
        self.first_products = PackedProducts(*self.models) if self.packs else nullcontext()
        self.compiler = Compiler(target, compile_config, self.packs)
        self.full_depth = self.schedule.deepest
        # The pending tokens of a round: all that it accepted, and the bonus token.
        self.width = max(self.full_depth, self.judge.deepest) + 1
        # Slots of the forwards over chains such as the last one, and over trees; and which of them rounds make.
        self.chain_slots, self.tree_slots = self.full_depth + 1, self.settings.tree_budget + 1
        self.most_slots = max(self.chain_slots, self.tree_slots)
        self.reads_trees = self.settings.tree_budget > 0
        # Columns that a draft may need after a text as long as the target's: the pending tokens of two rounds, and masks, or a
        # block, which is run whole however little of it is asked for: the anchor and as many masks as it can draft.
        whole_block = (self.drafter.max_draft_depth or 0) + 1
        self.draft_room = 3 * self.width + max(self.full_depth, whole_block)
        # The target's likeliest token is its choice.
        self.is_plain = not self.processors and not self.do_sample
        self.grows_trees = bool(self.settings.tree_budget) and self.search.ngram is None
        self.tree_arguments = self.search.arguments(self.settings.tree_budget)
        # A CPU has a whole round in one step where nothing happens between its parts. What a CUDA graph puts out, here the next
        # draft, would not outlive the step.
        waits = self.settings.time_rounds or self.recorder.enabled
        self.is_one_step = target.device.type == "cpu" and not waits and self.is_plain
        self.next_draft: Draft | None = None
        # Of how many rounds without a draft this one's reading of the drafter is.
        self.stands_for = 1
        self.decode_state: DecodeState | None = None

    def begin(self) -> None:
        super().begin()
        self._look_at_weights()

    def round(self) -> None:
        """Draft, read, verify and commit once."""
        # The target reads the prompt as ever, and then so does the drafter.
        if self.decode_state is None and self._reads_text:
            super().round()
            return
        # Else torch takes each step for a round of its own, before which a CUDA graph's memory may be used again.
        torch.compiler.cudagraph_mark_step_begin()
        self.plan = self._plan()
        depth, num_compiled = self.plan.depth, self.compiler.num_compiled
        self.is_unique, self.stands_for = self.decode_state is None, 1
        if depth:
            self.reads_trees = self.plan.budget > 0
            if not self.reads_trees:
                # Where there is room for a part of a chain only, the forward is that of a whole one.
                self.chain_slots = self.schedule.chosen.depth + 1
        self.is_ordinary = not (self.is_one_step and depth and not self._is_drafted)
        with self.stopwatch.part("draft"):
            draft = self._first_draft(depth) if self.decode_state is None else self._draft(depth)
        with self.stopwatch.part("tree"):
            tree = self._compiled_proposal(draft, depth)
            shown = self._shown(tree)
        with self.stopwatch.part("verify"):
            outcome, scores, logits = self._read_and_commit(tree, shown)
            on_host = outcome.tolist()
            paths, new_tokens = paths_of([on_host[index] for index in self.live], shown.num_nodes + 1)
        with self.stopwatch.part("commit"):
            self.recorder.add_scores(self.items, paths, scores, logits)
            counts = self.cut(new_tokens)
            for index, count in zip(self.live, counts, strict=True):
                self.lengths[index] += count
            self.num_pending += max(counts)
            self._note(tree, paths, new_tokens, counts)
            self._drop_finished_items()
        is_unique = self.is_unique or self.compiler.num_compiled > num_compiled
        self.schedule.end_round(self.is_ordinary, is_unique, self.stands_for)

    def entries_of(self, index: int) -> Entries:
        if self.decode_state is None:
            return super().entries_of(index)
        item = self.live[index]
        return self.target_side.cache.entries_of(item, self.lengths[item])

    def select_items(self, kept: list[int]) -> None:
        if self.decode_state is None:
            super().select_items(kept)
            return
        for item in {*self.live} - {self.live[index] for index in kept}:
            # It takes no room any more, and its positions are such as exist.
            self.decode_state.reset(item)
            self.lengths[item] = 0
        self._go_on_with([self.live[index] for index in kept])

    # From the first rounds to compiled ones.

    def _draft_logits(self) -> torch.Tensor | None:
        with self.first_products:
            return super()._draft_logits()

    def _read(self, tree: TokenTree | None) -> Any:
        with self.first_products:
            return super()._read(tree)

    def _first_draft(self, depth: int) -> Draft | None:
        """See [`_draft`]; moves everything into static tensors, after a draft as ever if the drafter has a prompt to read."""
        context, state = self.candidates.pending.take(), self.candidates.state
        has_read = state.cache.growing_layers() and context.new_ids.shape[1] <= self.width
        # One draft is not worth a compilation.
        if has_read and not self.is_one_step:
            self._switch(context)
            return self._draft(depth)
        # It has to read, even if no draft is asked for. And a tree is compiled for as many levels as there are in other rounds.
        with self.first_products:
            draft_logits = contiguous_copy(self.drafter.draft(context, state, self.full_depth))
        self._switch(context)
        self.draft_inputs.counts.zero_()
        self.num_pending = 0
        return self._with_chain(draft_logits) if depth else None

    def _switch(self, context: DraftInputs) -> None:
        """Move what the first rounds left into static tensors, and what the drafter read last, or has yet to read."""
        state, batch = self.candidates.state, len(self.items)
        cache, self.lengths = to_static_cache(self.reader.cache, batch, self.most_slots)
        state.cache, draft_lengths = to_static_cache(state.cache, batch, self.draft_room)
        self.draft_inputs, self.num_pending = to_static_inputs(context, self.width)
        ends = self.ends_of_items()[self.items]
        self.decode_state = first_decode_state(self.lengths, draft_lengths, self.pending, ends, self.reader.axis_shift)
        self._go_on_with(list(range(batch)))
        arguments = {name: value for name, value in self.reader.arguments.items() if name not in OWN_ARGUMENTS}
        self.target_side = TargetSide(
            self.target, arguments, self.reader.windows, self.candidates.taps, cache, self.decode_state
        )
        self.drafter_side = DrafterSide(self.drafter, state, self.draft_inputs, self.full_depth, self.token_ids)
        # What compiled code depends on, besides the models' and the tensors' own.
        windows, taps = tuple(self.reader.windows.items()), tuple(self.candidates.taps)
        self.read_shape = (batch, windows, taps, self.width)
        self.draft_shape = (id(self.drafter), self.search.most_tokens, batch)
        self.longest = self._longest()
        if not self.reader.on_host:
            # Of the cache that the first rounds grew, only the kinds of its layers are asked for.
            self.reader.forget_all()

    def _look_at_weights(self) -> None:
        """Let go of packed weights that are not what they were, or make nothing faster, or of all if none are wanted."""
        parameters = parameters_of(*self.models)
        for look in (forget_slower, forget_changed) if self.packs else (forget,):
            look(parameters)

    def _go_on_with(self, items: list[int]) -> None:
        """Note which items go on, here and on the device."""
        self.live, self.live_index = items, torch.tensor(items, device=self.sequences.device)

    def _longest(self) -> int:
        """Entries of an item's text for which there is room in this round."""
        target, drafter = self.target_side.cache, self.candidates.state.cache
        return min(target.capacity - self.most_slots, drafter.capacity - self.draft_room)

    def _make_room(self) -> None:
        """Let static KV caches grow that may be too small for this round."""
        longest, target, state = max(self.lengths), self.target_side, self.candidates.state
        if longest <= self.longest:
            return
        target.cache = with_room(target.cache, longest + self.most_slots)
        state.cache = with_room(state.cache, longest + self.draft_room)
        self.longest = self._longest()
        self.compiler.check_again()

    # The parts of a round.

    def _draft(self, depth: int) -> Draft | None:
        """A draft for the whole batch, at least as deep as the plan; `None` if none is asked for.

        Rounds in one step end with a draft as deep as theirs. One that is deeper is for itself, and as deep as ever.

        Where none are asked for round after round, the drafter must read the pending tokens before there is no room for more.
        """
        self._make_room()
        drafted, self.next_draft = self.next_draft, None
        if drafted is not None and drafted.depth < depth:
            steps.take_back(drafted, self.draft_inputs, self.decode_state)
            drafted = None
        if drafted is None:
            is_full = self.num_pending + self._slots() > self.width
            if depth == 0 and not is_full:
                return None
            self.stands_for = 1 if depth else max(self.num_pending, 1)
            drafted = self._run_draft()
        self.num_pending = 0
        return drafted if depth else None

    def _run_draft(self) -> Draft:
        return self.compiler(steps.draft, self._drafting(self.full_depth), self.drafter_side, self.decode_state)

    def _drafting(self, depth: int) -> tuple:
        """Let the next step draft so deep; returns what of that it is compiled for."""
        self.drafter_side.depth = depth
        return (*self.draft_shape, depth)

    def _compiled_proposal(self, draft: Draft | None, depth: int) -> TokenTree | None:
        """See [`SpeculativeDecoding._proposal`]; for the items that go on."""
        if draft is None:
            return None
        if isinstance(self.choice, RejectionSampling):
            return self._proposal(self._of_live(draft.logits)[:, :depth])
        if self.choice.couples:
            draft = self._coupled(draft)
        tree = self._grown_tree(draft, depth) if self.grows_trees and self.plan.budget else None
        if tree is not None:
            own = tree if self._all_live else items_of_tree(tree, self.live_index)
            return self._judged(own, self._of_live(draft.chain), self._of_live(draft.logits))
        if self.plan.budget:
            return self._search(self._of_live(draft.logits)[:, :depth])
        chain = self._of_live(draft.chain)
        return chain_tree(chain if depth == draft.depth else contiguous_copy(chain[:, :depth]))

    def _coupled(self, draft: Draft) -> Draft:
        """A draft made with the noise of the draws that it guesses; of items that are over it says nothing."""
        logits = self.choice.coupled(self._of_live(draft.logits))
        if not self._all_live:
            whole_batch = torch.zeros_like(draft.logits, dtype=logits.dtype)
            logits = whole_batch.index_copy_(0, self.live_index, logits)
        return self._with_chain(logits)

    def _with_chain(self, draft_logits: torch.Tensor) -> Draft:
        return Draft(draft_logits, tokens_of(likeliest(draft_logits), self.token_ids))

    def _grown_tree(self, draft: Draft, depth: int) -> TokenTree | None:
        """The tree of the first levels of a draft; `None` if that isn't compiled."""
        logits, search = draft.logits, self.search
        if self._grows_in_step:
            # Those of a first draft, and after chains, are not worth a compilation where others come from a whole round.
            return draft.tree if depth == self.full_depth else None
        if not (depth == self.full_depth or search.fills_any_depth(self.settings.tree_budget)):
            return None
        deepest = number_of_levels(depth, logits.device)
        shape = (tuple(logits.shape), self.tree_arguments)
        tensors = (logits, search.end_tokens, self.tree_arguments, deepest, self.token_ids)
        return self.compiler(steps.grow_tree, shape, *tensors)

    def _slots(self) -> int:
        """Slots of this round's forward: one number for whole chains and one for whole trees, since each is compiled.

        A forward of few tokens takes nearly as long as that of a whole draft. Where the drafter pauses, the anchor is alone.
        """
        if self.schedule.is_pausing:
            return 1
        return self.tree_slots if self.reads_trees else self.chain_slots

    def _shown(self, tree: TokenTree | None) -> TokenTree:
        """The tree of the compiled forward: of the whole batch, and filled up with nodes that match no choice."""
        num_nodes = tree.num_nodes if tree else 0
        slots = self._slots()
        if num_nodes == slots - 1 and self._all_live and tree:
            return tree
        device, batch = self.sequences.device, len(self.lengths)
        live = self.live_index
        tokens = torch.full((batch, slots - 1), NO_NODE, device=device)
        if tree:
            tokens[live, :num_nodes] = tree.tokens
        # Where nothing is proposed, too, the forward is the same as in all other rounds; and the anchor alone is a chain.
        if slots == 1 or not self.reads_trees:
            return chain_tree(tokens)
        ancestors = torch.eye(slots - 1, dtype=torch.bool, device=device).repeat(batch, 1, 1)
        shown = TokenTree(tokens, torch.zeros_like(tokens), torch.ones_like(tokens), ancestors)
        if tree:
            shown.parents[live, :num_nodes] = tree.parents
            shown.depths[live, :num_nodes] = tree.depths
            shown.ancestors[live, :num_nodes, :num_nodes] = tree.ancestors
        return shown

    def _read_and_commit(
        self, tree: TokenTree | None, shown: TokenTree
    ) -> tuple[torch.LongTensor, torch.Tensor | None, torch.Tensor | None]:
        """The target's forward and what follows from it: what the host reads (see [`steps.commit`]), scores and logits."""
        target, inputs = self.target_side, self.draft_inputs
        shape = (shown.num_nodes, shown.is_chain, self.read_shape)
        # Where the drafter pauses, it will hardly have to draft in the next round.
        if self.is_one_step and shown.num_nodes:
            settings = self.tree_arguments if self._grows_in_step else None
            outcome, self.next_draft = self.compiler(
                steps.read_commit_and_draft,
                (shape, self._drafting(self.schedule.chosen.depth or self.full_depth), settings),
                target,
                self.drafter_side,
                shown,
                self.search.end_tokens,
                settings,
            )
            return outcome, None, None
        if self.is_plain and not self.recorder.enabled:
            return self.compiler(steps.read_and_commit, shape, target, shown, inputs), None, None
        logits, states = self.compiler(steps.read, shape, target, shown)
        num_slots = 1 + (tree.num_nodes if tree else 0)
        logits = self._of_live(logits)[:, :num_slots]
        if self.recorder.scores is not None or self.recorder.logits is not None:
            # They outlast the round, unlike what compiled steps leave.
            logits = logits.clone()
        choices, scores, raw_logits = self.choose(logits, tree)
        if choices.shape != (len(self.lengths), shown.num_nodes + 1):
            own, choices = choices, choices.new_zeros(len(self.lengths), shown.num_nodes + 1)
            choices[self.live_index, :num_slots] = own
        return self.compiler(steps.commit, shape, target, shown, choices, states, inputs), scores, raw_logits

    @property
    def _grows_in_step(self) -> bool:
        """Whether a round in one step ends with the next tree."""
        return self.is_one_step and self.grows_trees and self.reads_trees

    @property
    def _is_drafted(self) -> bool:
        """Whether the last round has made this one's draft, and the tree that it reads: rounds in one step do, after others."""
        drafted = self.next_draft
        if drafted is None or drafted.depth < self.plan.depth:
            return False
        return drafted.tree is not None or not self._grows_in_step

    @property
    def _all_live(self) -> bool:
        return len(self.live) == len(self.lengths)

    def _of_live(self, values: torch.Tensor) -> torch.Tensor:
        """Of a tensor of the whole batch, the items that go on."""
        return values if self._all_live else values[self.live_index]


def packs_weights(device: torch.device, settings: DraftSettings) -> bool:
    """Whether compiled rounds on a device multiply by packed weights."""
    return device.type == "cpu" and settings.pack_weights
