"""From a batch to the scores that objectives are made of: one forward of the target, one of the drafter."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .layouts.attention import attending_with
from .layouts.blocks import UNKNOWN, SupervisedRows
from .layouts.forwards import FORWARDS, ROWS, target_reading, text_of
from .layouts.sampling import example_generator, some_of
from .losses.objectives import OBJECTIVES, BlockScores, reads_logits
from .losses.scoring import RowScorer, label_log_probs
from .losses.sums import confidence_weights
from .target.continuations import sample_continuations
from .target.features import TargetReading

# Where a batch keeps what the target wrote for it.
CONTINUATIONS = "target_continuations"


@dataclass
class Learner:
    """A drafter, the target that it learns from, and what it is to learn.

    Attributes:
        drafter, target: see `DraftTrainer`.
        coefficients: of the objectives, by name.
        depth: how many tokens the drafter learns to draft.
        rows_per_chunk, temperature: see [`RowScorer`].
        streak_prefixes: how many prefixes of an example the target continues.
        seed, epoch: of the continuations.
        attention: the drafter's implementation while it trains.
    """

    drafter: PreTrainedModel
    target: PreTrainedModel | None
    coefficients: dict[str, float]
    depth: int
    rows_per_chunk: int = 512
    temperature: float = 1.0
    streak_prefixes: int = 16
    seed: int = 0
    epoch: int = 0
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        asking = [name for name in self.coefficients if OBJECTIVES[name].asks_target]
        if asking and self.target is None:
            raise ValueError(f"{', '.join(asking)} learns from what the target says, and there is none: pass target=")

    @property
    def reads(self) -> set[str]:
        """Which optional fields of [`BlockScores`] the objectives read."""
        return {field for name in self.coefficients for field in OBJECTIVES[name].reads}

    @property
    def reads_logits(self) -> bool:
        """Whether the objectives read the target's logits behind the text itself."""
        return reads_logits(self.coefficients)

    @property
    def known_before(self) -> bool:
        """Whether all denominators follow from the batch alone."""
        return all(OBJECTIVES[name].known_before for name in self.coefficients)

    def rows(self, batch: dict) -> SupervisedRows:
        """The supervised rows of a batch."""
        rows = ROWS[self.drafter.training_layout](self.drafter, batch)
        rows.check_depth(self.depth)
        return rows

    def blank_scores(self, batch: dict) -> BlockScores:
        """Scores of 0, which have the denominators that are known before."""
        rows = self.rows(batch)
        zeros = torch.zeros(len(rows.labels), dtype=torch.float64, device=rows.labels.device)
        return self._in_blocks(rows, {"is_right": zeros > 0, "log_probs": zeros, "divergences": zeros})

    def scores(self, model: nn.Module, batch: dict, num_counted: int | None = None) -> BlockScores:
        """What the drafter and the target say of a batch.

        Args:
            model: the drafter, as wrapped for training.
            num_counted: the first so many examples count; `None` for all.
        """
        rows, reads = self.rows(batch), self.reads
        reading = target_reading(self.drafter, self.target, batch, self.reads_logits)
        continuations = self.continuations(rows, batch) if "continuations" in reads else None

        def target_logits(chunk: slice) -> torch.Tensor:
            logits = reading.logits(rows.samples[chunk], rows.places[chunk])
            return logits if rows.vocabulary is None else logits[:, rows.vocabulary.to(logits.device)]

        read_rows = RowScorer(
            rows.label_columns,
            "log_probs" in reads,
            continuations,
            target_logits if "divergences" in reads else None,
            self.temperature,
            self.rows_per_chunk,
        )
        forward = FORWARDS[self.drafter.training_layout]
        with attending_with(self.drafter, self.attention):
            scored = forward(model, self.drafter, self.target, batch, reading.features, read_rows)
        if "confidences" in reads:
            scored["confidences"] = self._confidences(rows, batch, reading)
        if continuations is not None:
            scored["continued"] = continuations >= 0
        return self._in_blocks(rows, scored, num_counted)

    def _in_blocks(
        self, rows: SupervisedRows, scored: dict[str, torch.Tensor], num_counted: int | None = None
    ) -> BlockScores:
        counted = torch.ones_like(rows.samples, dtype=torch.bool)
        if num_counted is not None:
            counted = rows.samples < num_counted
        device = scored["is_right"].device
        valid, known = (
            rows.grid(flags.to(device), self.depth) for flags in (counted, counted & (rows.label_columns != UNKNOWN))
        )
        grids = {name: rows.grid(values.to(device), self.depth) for name, values in scored.items()}
        if "continued" in grids:
            grids["continued"] = grids["continued"] & valid
        unbroken = known & ((valid & ~known).cumsum(dim=1) == 0)
        return BlockScores(valid=valid, known=known, unbroken=unbroken, **grids)

    @torch.no_grad()
    def _confidences(self, rows: SupervisedRows, batch: dict, reading: TargetReading) -> torch.Tensor:
        """How likely the target is to write what stands between each row's prefix and its label (PARD-2). `(rows,)`."""
        input_ids, _ = text_of(batch)
        batch_size, length = input_ids.shape
        samples = torch.arange(batch_size, device=input_ids.device).repeat_interleave(length - 1)
        places = torch.arange(length - 1, device=input_ids.device).repeat(batch_size)
        log_probs = []
        for start in range(0, len(samples), self.rows_per_chunk):
            chosen = slice(start, start + self.rows_per_chunk)
            logits = reading.logits(samples[chosen], places[chosen])
            log_probs.append(label_log_probs(logits, input_ids[samples[chosen], places[chosen] + 1].to(logits.device)))
        probabilities = torch.cat(log_probs).exp().view(batch_size, -1).to(rows.samples.device)
        # Nothing comes before the first token.
        probabilities = torch.nn.functional.pad(probabilities, (1, 0), value=1.0)
        ahead = torch.arange(self.depth, device=probabilities.device).repeat_interleave(length)
        index = torch.arange(length, device=probabilities.device).repeat(self.depth)
        weights = confidence_weights(
            probabilities, ahead.expand(batch_size, -1), index.expand(batch_size, -1), self.depth
        )
        return weights[rows.samples, (rows.positions - 1) * length + rows.places]

    def sampled(self, batch: dict) -> dict[str, torch.Tensor]:
        """What is to be added to a batch that is scored more than once, so that the target writes for it once."""
        if "continuations" not in self.reads:
            return {}
        return {CONTINUATIONS: self.continuations(self.rows(batch), batch)}

    def continuations(self, rows: SupervisedRows, batch: dict) -> torch.LongTensor:
        """What the target itself writes in place of each label, behind some of the prefixes; as columns, `(rows,)`."""
        if CONTINUATIONS in batch:
            return batch[CONTINUATIONS]
        input_ids, mask = text_of(batch)
        samples, anchors = rows.prefixes.cpu().unbind(dim=1)
        chosen, uniforms, texts = [], [], []
        for sample in samples.unique().tolist():
            text = input_ids[sample][mask[sample].bool()]
            generator = example_generator(self.seed, self.epoch, text.cpu())
            blocks = some_of((samples == sample).nonzero()[:, 0], self.streak_prefixes, generator)
            chosen.append(blocks)
            uniforms.append(torch.rand(len(blocks), self.depth, generator=generator))
            texts += [prefix_in(batch, sample, anchor) for anchor in anchors[blocks].tolist()]
        found = torch.full((len(samples), self.depth), UNKNOWN, device=input_ids.device)
        if texts:
            written = sample_continuations(self.target, texts, torch.cat(uniforms)).to(found.device)
            columns = rows.columns(written)
            # A token that the drafter can't write ends the streak.
            columns = columns.masked_fill((columns == UNKNOWN).cumsum(dim=1) > 0, UNKNOWN)
            found[torch.cat(chosen).to(found.device)] = columns
        return found[rows.blocks, rows.positions - 1]


def prefix_in(batch: dict, sample: int, anchor: int) -> torch.LongTensor:
    """A document's tokens up to and including the anchor, `(length,)`; of a packed row those of the anchor's document alone."""
    input_ids, _ = text_of(batch)
    prefix = input_ids[sample, : anchor + 1]
    documents = batch.get("document_ids", batch.get("row_document"))
    if documents is None:
        return prefix
    # A row of tokens stands at its place, before all rows of masks.
    documents = documents[sample, : anchor + 1]
    return prefix[documents == documents[-1]]
