"""What of a drafted tree, and of what the text itself suggests, is worth the target's time; and what became of it."""

from collections.abc import Sequence

import torch

from .prompt_lookup import MATCHING_NGRAM_SIZE, PromptLookup, with_matches
from .scheduling.confidence import ClaimedTree, best_nodes
from .scheduling.fixed import FixedSchedule
from .scheduling.schedule import Schedule
from .settings import DraftSettings
from .tree.token_tree import TokenTree, chain_tree, node_log_probabilities, nodes_of_tree, tree_of_lists


class DraftJudge:
    """Looks at each draft of a call before the target does, where that pays.

    Args:
        schedule: says whether it pays, and remembers what drafts were worth.
        lookup: what looks the text up for trees; `None` for nothing.
    """

    def __init__(self, schedule: Schedule | FixedSchedule, lookup: PromptLookup | None) -> None:
        self.schedule, self.lookup = schedule, lookup
        # What speaks for this round's drafts, if anybody asked.
        self.claims: list[ClaimedTree] | None = None
        # The likeliest tokens of this round's tree, `depth` for each item, if anybody asked.
        self.likeliest: list[list[int]] | None = None
        # What the text suggested where nothing is read of it: the length of the match, and the next token.
        self.suggested: tuple[int, int] | None = None

    @property
    def deepest(self) -> int:
        """How deep a tree may be that holds what the text suggests."""
        return self.lookup.num_tokens if self.lookup else 0

    def select_items(self, kept: Sequence[int]) -> None:
        """Go on with only some items."""
        if self.lookup is not None:
            self.lookup.select_items(kept)

    def finds_any(self) -> bool:
        """Whether a text suggests anything."""
        return self.lookup is not None and self.lookup.finds_any()

    def remember_chain(self, chain: torch.LongTensor) -> None:
        """Keep what a chain would have drafted where a tree is, `(items, depth)`, if the schedule compares them for nothing."""
        if self.schedule.compares:
            self.likeliest = chain.tolist()

    def worth_reading(
        self, tree: TokenTree, draft_logits: torch.Tensor, token_ids: torch.LongTensor | None, room: int
    ) -> TokenTree | None:
        """The nodes of a draft, and of what the texts suggest, that are worth the target's time; `None` for none.

        There are no more of them than the draft alone has.

        Args:
            tree: the draft.
            draft_logits: `(items, depth, columns)`, the marginals that it was made of.
            token_ids: of the columns; `None` if they are the same.
            room: how deep into the tree what the texts suggest may go.
        """
        if not self.schedule.reading.looks_at(tree.num_nodes, has_text=room > 0):
            return tree
        claims = node_log_probabilities(tree, draft_logits, token_ids).tolist()
        parents = tree.parents.tolist()
        drafts = [ClaimedTree(*both) for both in zip(parents, claims, strict=True)]
        if room:
            # Whether it is right is told by the tree.
            self.suggested = None
            tokens = tree.tokens.tolist()
            matches = self.lookup.matches(tokens, parents, room)
            tokens, drafts = zip(*map(with_matches, tokens, drafts, matches), strict=True)
        probabilities = list(map(self.schedule.calibration.probabilities, drafts))
        count = self.schedule.reading.worth_it(probabilities, tree.num_nodes)
        chosen = [best_nodes(*each, count) for each in zip(drafts, probabilities, strict=True)]
        kept, parents = zip(*chosen, strict=True)
        self.claims = [draft.nodes(*each) for draft, each in zip(drafts, chosen, strict=True)]
        if count == 0:
            return None
        if room:
            tokens = [[of_item[node] for node in nodes] for of_item, nodes in zip(tokens, kept, strict=True)]
            return tree_of_lists(tokens, parents, tree.tokens.device)
        return nodes_of_tree(tree, kept, parents) if count < tree.num_nodes else tree

    def worth_reading_alone(self, room: int, device: torch.device) -> TokenTree | None:
        """What the text suggests by itself, as far as to read that is better than to follow the plan; `None` for nothing.

        For one item. If nothing of it is read, whether its first token is right is known all the same.

        Args:
            room: tokens of it at most.
            device: of the text.
        """
        match = self.lookup.match(room)
        if match is None:
            return None
        probabilities = self.schedule.calibration.probabilities_after_match(match.length, len(match.tokens))
        count = self.schedule.worth_reading_alone(probabilities)
        if count == 0:
            self.suggested = match.length, match.tokens[0]
            return None
        self.claims = [ClaimedTree.after_match(match.length, count)]
        return chain_tree(torch.tensor([match.tokens[:count]], device=device))

    def look_back(self, written: Sequence[int]) -> None:
        """Find out what the text would have suggested to rounds without a draft, where these tokens were written after it.

        For one item.
        """
        calibration, counts, at = self.schedule.calibration, {}, 0
        while at < len(written):
            match, count, num_right = self.lookup.match(len(written) - at), 0, 0
            if match is not None:
                length, tokens = match
                if length not in counts:
                    probabilities = calibration.probabilities_after_match(length, len(tokens))
                    counts[length] = self.schedule.worth_reading_without_drafts(probabilities)
                count = min(counts[length], len(tokens))
                # As in a round, whether the first one is right is known if none is read.
                num_judged = max(count, 1)
                num_right, _ = of_chain(tokens[:num_judged], written[at : at + num_judged])
                calibration.note([(ClaimedTree.after_match(length, num_judged), range(num_right + 1), True)])
            new = written[at : at + min(num_right, count) + 1]
            self.schedule.note_text(count, len(new))
            self.lookup.extend([new])
            at += len(new)

    def note(
        self,
        was_drafted: bool,
        outcomes: Sequence[tuple[int, int]],
        paths: Sequence[Sequence[int]],
        new_tokens: Sequence[Sequence[int]],
        items: Sequence[int],
        of_call: Sequence[int],
    ) -> None:
        """Learn from a round.

        Args:
            was_drafted: whether the target read a draft.
            outcomes: what became of each draft of `items`, see [`AcceptanceRates.note`].
            paths: for each item of the batch, the slots that were accepted, the anchor's first.
            new_tokens: for each, what it got; fewer where its text ended.
            items: those of the batch that the round was about.
            of_call: the items of the call that are in the batch.
        """
        if self.lookup is not None:
            self.lookup.extend(new_tokens)
        if was_drafted or self.claims is not None:
            chains = self.likeliest and [of_chain(self.likeliest[item], new_tokens[item]) for item in items]
            self.schedule.note(outcomes, chains, [of_call[item] for item in items])
            self.likeliest = None
        if self.claims is not None:
            counts = list(map(len, new_tokens))
            drafts = [
                (self.claims[item], paths[item][: counts[item]], counts[item] == len(paths[item])) for item in items
            ]
            self.schedule.calibration.note(drafts)
            of_text = sum(draft.num_undrafted(path) for draft, path, _ in drafts)
            self.schedule.reading.end_look(of_text / len(items))
            self.claims = None
        if self.suggested is not None:
            length, token = self.suggested
            is_right = new_tokens[0][:1] == [token]
            self.schedule.calibration.note([(ClaimedTree.after_match(length, 1), [0, 1] if is_right else [0], True)])
            self.suggested = None


def lookup_for(settings: DraftSettings, is_hybrid: bool) -> PromptLookup | None:
    """What looks the text up for the rounds' trees, if the call wants that and has trees.

    Args:
        settings: of the call.
        is_hybrid: whether the target has recurrent layers besides attention.
    """
    if not settings.prompt_lookup_num_tokens or not settings.tree_budget or is_hybrid:
        return None
    return PromptLookup(settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size or MATCHING_NGRAM_SIZE)


def of_chain(drafted: Sequence[int], new_tokens: Sequence[int]) -> tuple[int, int]:
    """What would have become of a chain in a round that wrote `new_tokens`; see [`AcceptanceRates.note`]."""
    wrong = next((at for at, pair in enumerate(zip(drafted, new_tokens, strict=False)) if pair[0] != pair[1]), None)
    known = min(len(drafted), len(new_tokens))
    return (known, known) if wrong is None else (wrong, wrong + 1)
