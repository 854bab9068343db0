"""From a batch to the scores that objectives are made of: one forward of the target, one of the drafter."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .arguments import DraftTrainingArguments
from .checks import check_asks_no_target
from .data.documents import PADDING
from .layouts import layout_of
from .layouts.attention import attending_with, compute_dtype, training_attention
from .layouts.base import UNKNOWN, Layout, SupervisedPositions, example_generator, some_of
from .losses.objectives import OBJECTIVES, BlockScores, parse_objective, reads_logits
from .losses.scoring import PositionScorer, label_log_probs, rows_at_once, rows_that_stay, slices
from .losses.sums import confidence_weights, wide
from .target.continuations import sample_continuations
from .target.reading import TargetReading, target_reading

# Where a batch keeps what the target wrote for it.
CONTINUATIONS = "target_continuations"


@dataclass
class BatchScorer:
    """Says of a batch what the drafter and the target make of it, as the objectives read it.

    Attributes:
        layout: of the batches.
        drafter, target: see `DraftTrainer`.
        coefficients: of the objectives, by name.
        depth: how many tokens the drafter learns to draft.
        chunk_size, temperature: see [`PositionScorer`]; without a size a chunk is as [`rows_at_once`] says.
        streak_prefixes: how many prefixes of an example the target continues.
        seed, epoch: of the continuations.
        attention: the drafter's implementation while it trains.
    """

    layout: type[Layout]
    drafter: PreTrainedModel
    target: PreTrainedModel | None
    coefficients: dict[str, float]
    depth: int
    chunk_size: int | None = None
    temperature: float = 1.0
    streak_prefixes: int = 16
    seed: int = 0
    epoch: int = 0
    attention: str = "sdpa"

    @classmethod
    def for_training(
        cls, drafter: PreTrainedModel, target: PreTrainedModel | None, args: DraftTrainingArguments
    ) -> "BatchScorer":
        """One that is set up from the drafter and the training arguments; a `ValueError` if they don't fit together."""
        coefficients = parse_objective(args.objective or drafter.training_objective)
        check_asks_no_target(coefficients, target)
        return cls(
            layout=layout_of(drafter),
            drafter=drafter,
            target=target,
            coefficients=coefficients,
            depth=drafter.taught_depth(args.draft_tokens),
            chunk_size=args.loss_chunk_rows,
            temperature=args.kl_temperature,
            streak_prefixes=args.streak_prefixes,
            seed=args.seed,
            attention=training_attention(drafter, args.training_attention, args.device),
        )

    @property
    def reads(self) -> set[str]:
        """Which optional fields of [`BlockScores`] the objectives read."""
        return {field for name in self.coefficients for field in OBJECTIVES[name].reads}

    @property
    def reads_logits(self) -> bool:
        """Whether the objectives read the target's logits after the text itself."""
        return reads_logits(self.coefficients)

    @property
    def known_before(self) -> bool:
        """Whether all denominators follow from the batch alone."""
        return all(OBJECTIVES[name].known_before for name in self.coefficients)

    def supervised(self, batch: dict) -> SupervisedPositions:
        """What is learned of a batch."""
        supervised = self.layout.supervised(batch, self.drafter)
        supervised.check_depth(self.depth)
        return supervised

    def _num_columns(self, supervised: SupervisedPositions) -> int:
        vocabulary = supervised.vocabulary
        return self.drafter.config.vocab_size if vocabulary is None else len(vocabulary)

    def blank_scores(self, batch: dict) -> BlockScores:
        """Scores of 0, which have the denominators that are known before."""
        supervised = self.supervised(batch)
        zeros = wide(torch.zeros_like(supervised.labels))
        return self._in_blocks(supervised, {"is_right": zeros > 0, "log_probs": zeros, "divergences": zeros})

    def scores(self, model: nn.Module, batch: dict, num_counted: int | None = None) -> BlockScores:
        """What the drafter and the target say of a batch.

        Args:
            model: the drafter, as wrapped for training.
            num_counted: the first so many batch items count; `None` for all.
        """
        supervised, reads = self.supervised(batch), self.reads
        reading = target_reading(self.drafter, self.target, batch, self.reads_logits)
        continuations = self.continuations(supervised, batch) if "continuations" in reads else None

        num_columns = self._num_columns(supervised)

        def target_logits(chunk: slice) -> torch.Tensor:
            return reading.logits(supervised.items[chunk], supervised.places[chunk], supervised.vocabulary)

        score = PositionScorer(
            supervised.label_columns,
            "log_probs" in reads,
            continuations,
            target_logits if "divergences" in reads else None,
            self.temperature,
            self.chunk_size or rows_at_once(num_columns, supervised.labels.device, compute_dtype(self.drafter)),
            self.chunk_size or rows_that_stay(num_columns),
        )
        with attending_with(self.drafter, self.attention):
            scored = self.layout.forward(model, self.drafter, self.target, batch, reading.features, score)
        if "confidences" in reads:
            scored["confidences"] = self._confidences(supervised, batch, reading)
        if continuations is not None:
            scored["continued"] = continuations >= 0
        return self._in_blocks(supervised, scored, num_counted)

    def _in_blocks(
        self, supervised: SupervisedPositions, scored: dict[str, torch.Tensor], num_counted: int | None = None
    ) -> BlockScores:
        counted = torch.ones_like(supervised.items, dtype=torch.bool)
        if num_counted is not None:
            counted = supervised.items < num_counted
        scored = {"valid": counted, "known": counted & (supervised.label_columns != UNKNOWN), **scored}
        if supervised.stands_for is not None:
            scored["stands_for"] = supervised.stands_for
        device = scored["is_right"].device
        grids = {name: supervised.grid(values.to(device), self.depth) for name, values in scored.items()}
        valid, known = grids["valid"], grids["known"]
        if "continued" in grids:
            grids["continued"] = grids["continued"] & valid
        return BlockScores(**grids, unbroken=known & ((valid & ~known).cumsum(dim=1) == 0))

    @torch.no_grad()
    def _confidences(self, supervised: SupervisedPositions, batch: dict, reading: TargetReading) -> torch.Tensor:
        """How likely the target is to write what stands between each position's prefix and its label (PARD-2).
        `(positions,)`."""
        input_ids, _ = self.layout.text(batch)
        batch_size, length = input_ids.shape
        items = torch.arange(batch_size, device=input_ids.device).repeat_interleave(length - 1)
        places = torch.arange(length - 1, device=input_ids.device).repeat(batch_size)
        log_probs = []
        size = self.chunk_size or rows_at_once(
            self.drafter.config.vocab_size, input_ids.device, compute_dtype(self.target or self.drafter)
        )
        for chunk in slices(len(items), size):
            logits = reading.logits(items[chunk], places[chunk])
            log_probs.append(label_log_probs(logits, input_ids[items[chunk], places[chunk] + 1].to(logits.device)))
        probabilities = torch.cat(log_probs).exp().view(batch_size, -1).to(supervised.items.device)
        # Nothing comes before the first token.
        probabilities = torch.nn.functional.pad(probabilities, (1, 0), value=1.0)
        ahead = torch.arange(self.depth, device=probabilities.device).repeat_interleave(length)
        index = torch.arange(length, device=probabilities.device).repeat(self.depth)
        weights = confidence_weights(
            probabilities, ahead.expand(batch_size, -1), index.expand(batch_size, -1), self.depth
        )
        return weights[supervised.items, (supervised.draft_positions - 1) * length + supervised.places]

    def sampled(self, batch: dict) -> dict[str, torch.Tensor]:
        """What is to be added to a batch that is scored more than once, so that the target writes for it once."""
        if "continuations" not in self.reads:
            return {}
        return {CONTINUATIONS: self.continuations(self.supervised(batch), batch)}

    def continuations(self, supervised: SupervisedPositions, batch: dict) -> torch.LongTensor:
        """What the target itself writes in place of each label, after some of the prefixes; as columns, `(positions,)`."""
        if CONTINUATIONS in batch:
            return batch[CONTINUATIONS]
        input_ids, documents = self.layout.text(batch)
        items, anchors = supervised.prefixes.cpu().unbind(dim=1)
        chosen, uniforms, prefixes = [], [], []
        for item in items.unique().tolist():
            text = input_ids[item][documents[item] != PADDING]
            generator = example_generator(self.seed, self.epoch, text.cpu())
            blocks = some_of((items == item).nonzero()[:, 0], self.streak_prefixes, generator)
            chosen.append(blocks)
            uniforms.append(torch.rand(len(blocks), self.depth, generator=generator))
            prefixes += [prefix_in(input_ids[item], documents[item], anchor) for anchor in anchors[blocks].tolist()]
        found = torch.full((len(items), self.depth), UNKNOWN, device=input_ids.device)
        if prefixes:
            written = sample_continuations(self.target, prefixes, torch.cat(uniforms)).to(found.device)
            columns = supervised.columns(written)
            # A token that the drafter can't write ends the streak.
            columns = columns.masked_fill((columns == UNKNOWN).cumsum(dim=1) > 0, UNKNOWN)
            found[torch.cat(chosen).to(found.device)] = columns
        return found[supervised.blocks, supervised.draft_positions - 1]


def prefix_in(input_ids: torch.LongTensor, documents: torch.LongTensor, anchor: int) -> torch.LongTensor:
    """A document's tokens up to and including the anchor, `(length,)`, from a text and its documents, `(length,)` each."""
    return input_ids[: anchor + 1][documents[: anchor + 1] == documents[anchor]]
