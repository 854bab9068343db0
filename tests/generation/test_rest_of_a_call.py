"""Calls whose rest is left to plain `generate` after some rounds: everything is as if it had written all of it."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from drawn_plans import DrawnSchedule
from hf_pardraft.generation import hooks
from hf_pardraft.generation.plain import PlainRest
from hf_pardraft.generation.scheduling.schedule import Schedule
from pairwise import every_two_meet
from sampled_cases import double_target, knowing, unpadded
from tiny_models import batch_of, every_architecture, tiny_drafter
from unusual_targets import hybrid_target

KINDS = ("pard", "dflash", "dflare", "dart")
NEW = 24


class LeavingSchedule(DrawnSchedule):
    """Drawn plans for some rounds, and then no more."""

    def __init__(self, depth: int, budget: int, num_rounds: int) -> None:
        super().__init__(depth, budget, is_compiled=False)
        self.num_left = num_rounds

    def leaves_rest_to_plain(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0


@pytest.fixture
def leave(monkeypatch):
    """Lets all calls leave their rest after so many rounds; returns the list of what was new by then."""
    left, write = [], PlainRest.write

    def leave_after(num_rounds: int) -> list[int]:
        def schedule_for(target, drafter, settings, generation_config, batch):
            return LeavingSchedule(settings.depth, settings.tree_budget, num_rounds)

        monkeypatch.setattr(hooks, "schedule_for", schedule_for)
        return left

    def noted(self, text, num_new, stats):
        left.append(num_new)
        return write(self, text, num_new, stats)

    monkeypatch.setattr(PlainRest, "write", noted)
    return leave_after


def called(target, batch, drafter=None, seed=5, **options):
    torch.manual_seed(seed)
    result = target.generate(**batch, assistant_model=drafter, **{"max_new_tokens": NEW, "do_sample": False, **options})
    return result, torch.get_rng_state()


def assert_rest_is_plain(target, batch, kind="pard", budget=10, **options):
    """Assert that text and generator are plain's; returns the drafted call's result, plain's, and its statistics."""
    plain, state = called(target, batch, **options)
    sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
    texts = unpadded(sequences, batch["attention_mask"])
    drafter = knowing(kind, target, texts, budget)
    found, found_state = called(target, batch, drafter, **options)
    assert torch.equal(found if isinstance(found, torch.Tensor) else found.sequences, sequences)
    assert torch.equal(found_state, state)
    return found, plain, drafter.last_stats


OPTIONS = [{}, {"do_sample": True, "top_k": 0}, {"do_sample": True, "repetition_penalty": 1.3}]


@pytest.mark.parametrize(("kind", "lengths", "options"), every_two_meet(KINDS, [(6,), (6, 3, 8)], OPTIONS))
def test_the_text_is_plain_generates_whenever_it_takes_over(leave, kind, lengths, options):
    target, batch = double_target(), batch_of(*lengths)
    for num_rounds in (1, 2, 4):
        left = leave(num_rounds)
        assert_rest_is_plain(target, batch, kind, **options)
        assert 1 <= left.pop() < NEW
        assert not left


@pytest.mark.parametrize(("architecture", "kind"), every_architecture(["dflash"]))
def test_every_architecture_goes_on_or_is_drafted_for_to_the_end(leave, architecture, kind):
    leave(3)
    assert_rest_is_plain(double_target(architecture), batch_of(6, 3), kind)


def test_texts_whose_layers_have_forgotten_what_plain_generate_needs_are_not_cut(leave):
    left, target = leave(5), double_target("mistral", sliding_window=4)
    assert_rest_is_plain(target, batch_of(9, 3, 12))
    assert_rest_is_plain(target, batch_of(9))
    assert len(left) == 1


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_recurrent_layers_go_on_where_they_are(leave, name):
    left, target = leave(4), hybrid_target(name).double()
    if name == "qwen3_next":
        # Fused experts know no float64.
        target.set_experts_implementation("eager")
    assert_rest_is_plain(target, batch_of(6), budget=0)
    assert left


def test_ends_of_text_and_the_statistics_of_all_tokens(leave):
    left, batch = leave(2), batch_of(6, 3, 8)
    plain, _ = called(double_target(eos_token_id=None), batch)
    end = int(plain[0, 8 + 9])
    target = double_target(eos_token_id=end, pad_token_id=0)
    found, _, stats = assert_rest_is_plain(target, batch)
    rows = found[:, 8:].tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in rows]
    assert sum(stats.tokens_per_round) == sum(lengths)
    assert all(0 <= a <= t for a, t in zip(stats.accepted_per_round, stats.tokens_per_round, strict=True))
    assert stats.rounds == len(stats.items_per_round)
    assert left


@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_items_that_have_left_a_batch_of_a_windowed_target_keep_the_rest_here(leave, architecture):
    target, batch = double_target(architecture, sliding_window=8), batch_of(20, 2, 3, 2, 3)
    plain, _ = called(target, batch, eos_token_id=None)
    # The longest item is over first: it alone has dropped columns, and those that go on have another place in the batch then.
    end = int(plain[0, 20 + 2])
    left = leave(NEW)
    for num_rounds in range(1, 12):
        leave(num_rounds)
        for budget in (0, 8):
            assert_rest_is_plain(target, batch, budget=budget, eos_token_id=end, pad_token_id=0)
    assert all(num_new <= 3 for num_new in left)


@pytest.mark.parametrize("lengths", [(6,), (6, 3)])
def test_scores_and_logits_are_those_of_the_whole_text(leave, lengths):
    left, target = leave(3), double_target()
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.5}
    found, plain, _ = assert_rest_is_plain(target, batch_of(*lengths), do_sample=True, top_k=0, **options)
    assert left
    for ours, theirs in ((found.scores, plain.scores), (found.logits, plain.logits)):
        assert len(ours) == len(theirs) == NEW
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs))


@pytest.mark.parametrize("lengths", [(6,), (6, 3)])
def test_a_returned_cache_goes_on(leave, lengths):
    left, target, batch = leave(3), double_target(), batch_of(*lengths)
    found, plain, _ = assert_rest_is_plain(target, batch, return_dict_in_generate=True)
    assert left
    texts = []
    for result in (found, plain):
        assert result.past_key_values.get_seq_length() == plain.sequences.shape[1] - 1
        ids = torch.cat([result.sequences, torch.tensor([[9, 8]]).expand(len(lengths), -1)], dim=1)
        new = ids.shape[1] - batch["attention_mask"].shape[1]
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, new), value=1)
        again = target.generate(ids, attention_mask=mask, past_key_values=result.past_key_values, max_new_tokens=9)
        texts.append(again)
    assert torch.equal(*texts)
    # And a turn that begins with a cache is left as well.
    found, _ = called(target, batch, tiny_drafter("pard", target), return_dict_in_generate=True)
    ids = torch.cat([found.sequences, found.sequences[:, -1:]], dim=1)
    mask = torch.nn.functional.pad(
        batch["attention_mask"], (0, ids.shape[1] - batch["attention_mask"].shape[1]), value=1
    )
    turn = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(
        called(target, turn)[0],
        called(target, turn, tiny_drafter("pard", target), past_key_values=found.past_key_values)[0],
    )
    assert len(left) == 3


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_calls_that_return_states_are_drafted_to_the_end(leave, wanted):
    left, target = leave(2), double_target()
    found, plain, _ = assert_rest_is_plain(target, batch_of(6), return_dict_in_generate=True, **{wanted: True})
    assert not left
    name = wanted.removeprefix("output_")
    assert len(vars(found)[name]) == len(vars(plain)[name])


def test_what_a_caller_does_with_each_forward_keeps_the_rest_here(leave):
    left, target = leave(2), double_target()
    update = target._update_model_kwargs_for_generation
    seen = []

    def looking(outputs, *arguments, **options):
        seen.append(outputs.logits.shape)
        return update(outputs, *arguments, **options)

    target._update_model_kwargs_for_generation = looking
    assert_rest_is_plain(target, batch_of(6))
    assert seen
    assert not left


class Counting(LogitsProcessor):
    """Remembers how often it was called, and draws a random number each time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        return scores + 0.01 * self.num_calls * torch.rand_like(scores)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lengths", [(6,), (6, 3)])
def test_processors_that_remember_and_draw_are_called_once_a_token(leave, lengths, do_sample):
    left, target, batch = leave(2), double_target(), batch_of(*lengths)
    processors = [Counting(), Counting()]
    texts = [
        called(target, batch, drafter, do_sample=do_sample, logits_processor=LogitsProcessorList([processor]))
        for processor, drafter in zip(processors, (None, tiny_drafter("dflash", target)), strict=True)
    ]
    assert torch.equal(texts[0][0], texts[1][0])
    assert torch.equal(texts[0][1], texts[1][1])
    assert processors[0].num_calls == processors[1].num_calls
    assert left


class Streamer:
    def __init__(self) -> None:
        self.tokens, self.ends = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ends += 1


def test_a_streamer_gets_each_token_once_and_one_end(leave):
    left, target, batch = leave(2), double_target(), batch_of(6)
    streamer = Streamer()
    found, _ = called(target, batch, tiny_drafter("pard", target), streamer=streamer)
    assert (streamer.tokens, streamer.ends) == (found[0].tolist(), 1)
    assert left


def test_several_sequences_of_each_prompt(leave):
    left = leave(3)
    assert_rest_is_plain(double_target(), batch_of(6, 3), do_sample=True, top_k=0, num_return_sequences=2)
    assert left


def test_statistics_are_this_calls_from_its_beginning_on(monkeypatch):
    """Also of a call that is left as a whole and fails on the way."""
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    target, batch, seen = double_target(), batch_of(6), []
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.draft_schedule = "auto"
    called(target, batch, drafter)
    before = drafter.last_stats
    assert before.rounds == NEW

    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(drafter.last_stats)
            if input_ids.shape[1] == 10:
                raise KeyboardInterrupt
            return scores

    with pytest.raises(KeyboardInterrupt):
        called(target, batch, drafter, logits_processor=LogitsProcessorList([Failing()]))
    assert all(stats is drafter.last_stats is not before for stats in seen)
