"""An evaluation's figures from hand-made runs, and how they are shown."""

import json
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hf_pardraft.checkpoints.atomic_files import write_whole
from hf_pardraft.evaluation.calls import Condition, TimedRun, Watched
from hf_pardraft.evaluation.entries import (
    PLAIN,
    Entry,
    drafter_entries,
    plain_entry,
    settings_grid,
    stock_dflash_entries,
)
from hf_pardraft.evaluation.measurement import Measured
from hf_pardraft.evaluation.report import (
    Report,
    as_json,
    difference_lines,
    drafts_table,
    markdown,
    print_table,
    same_text,
    screen_table,
)
from hf_pardraft.evaluation.rows import Difference, compare, first_difference, summarise
from hf_pardraft.evaluation.runner import judge_near_tie, rounding
from hf_pardraft.evaluation.workbench import show
from hf_pardraft.generation.stats import Proposal
from tiny_models import random_prompt, tiny_drafter, tiny_target

TEXTS = ((1, 2, 3, 4), (5, 6))
PLAIN_ROUNDS = Watched(TEXTS, 4, (1,) * 6)


def plain_measured():
    return Measured(plain_entry(), [[TimedRun(TEXTS, 3.0), TimedRun(TEXTS, 2.0)]], [PLAIN_ROUNDS])


def drafted_measured(texts=TEXTS):
    # Item 0: one right of two drafts; then the last token. Item 1: a right draft ends the text; what comes after is unknown.
    proposals = (
        Proposal(0, 0, (1, 9), (1, 2), 1, 2),
        Proposal(1, 0, (5, 6), (1, 2), 2, 2),
        Proposal(0, 2, (3, 4), (1, 2), 2, 2),
    )
    seconds = {"draft": 0.1, "tree": 0.0, "verify": 0.25, "commit": 0.05}
    watched = Watched(TEXTS, 2, (2, 2, 2), proposals, seconds)
    return Measured(Entry("d", setting={"tree_budget": 0}), [[TimedRun(texts, 1.0), TimedRun(TEXTS, 0.5)]], [watched])


def row(condition=None, texts=TEXTS):
    return summarise(drafted_measured(texts), plain_measured(), condition or Condition(batch_size=2))


def test_the_figures_by_hand():
    figures = row()
    assert (figures.tokens_per_second, figures.speedup, figures.tau) == pytest.approx((12.0, 4.0, 2.0))
    assert figures.acceptance_by_position == pytest.approx([1.0, 2 / 3])
    assert figures.correct_by_position == pytest.approx([1.0, 2 / 3])
    # Six drafted slots and one bonus token; one draft was wrong, and nothing right was thrown away.
    assert (figures.accept, figures.correct, figures.waste) == pytest.approx((6 / 7, 6 / 7, 0.0))
    assert figures.shares == pytest.approx({"draft": 0.25, "tree": 0.0, "verify": 0.625, "commit": 0.125})
    assert figures.milliseconds_by_part["draft"] == pytest.approx(50.0)
    assert figures.milliseconds_per_round == pytest.approx(250.0)
    assert (figures.identical, figures.num_different, figures.new_tokens) == (True, 0, 6)


def test_tau_and_the_time_of_a_round_are_of_the_runs_whose_speed_is_told():
    """A schedule may have drafted more in them than when it was watched, or less."""
    measured = drafted_measured()
    measured.runs[0][1] = TimedRun(TEXTS, 0.5, (4, 2), 1)
    figures = summarise(measured, plain_measured(), Condition(batch_size=2))
    assert (figures.tau, figures.milliseconds_per_round) == pytest.approx((3.0, 500.0))
    assert figures.milliseconds_by_part["draft"] == pytest.approx(50.0)


def test_plain_generate_tells_nothing_of_drafts():
    figures = summarise(plain_measured(), plain_measured(), Condition(batch_size=2))
    assert (figures.speedup, figures.tau, figures.identical) == (1.0, 1.0, True)
    assert (figures.acceptance_by_position, figures.waste, figures.shares) == (None, None, None)


def test_one_other_token_in_one_run_is_found():
    figures = row(texts=((1, 2, 3, 4), (5, 7)))
    assert (figures.identical, figures.num_different) == (False, 1)
    assert figures.differences == [Difference(prompt=1, position=1, plain_token=6, token=7)]
    assert row(Condition(batch_size=2, temperature=1.0), texts=((9,), (9,))).identical is None


def timed(name, *runs):
    """An entry on two batches of one prompt, each with as many repeats as are given: new tokens, rounds and seconds."""
    entry = plain_entry() if name == "plain" else Entry(name)
    return Measured(
        entry, [[TimedRun((tokens,), seconds, rounds) for tokens, rounds, seconds in each] for each in runs], []
    )


def test_each_prompt_counts_with_its_fastest_repeat():
    plain = timed("plain", [((1, 2), (1, 1), 4.0), ((1, 2), (1, 1), 2.0)], [((3, 4), (1, 1), 2.0)] * 2)
    drafted = timed("drafted", [((1, 2), (2,), 1.0), ((1, 2), (2,), 3.0)], [((3, 4), (1, 1), 1.0)] * 2)
    found = compare([plain, drafted], Condition())[1]
    assert (found.tokens_per_second, found.speedup, found.tau) == pytest.approx((4 / 2.0, 2.0, 8 / 6))
    assert found.identical


def test_one_other_token_in_one_repeat_is_not_identical():
    plain = timed("plain", [((1, 2), (1, 1), 1.0)] * 2)
    drafted = timed("drafted", [((1, 2), (2,), 1.0), ((1, 3), (2,), 1.0)])
    assert not compare([plain, drafted], Condition())[1].identical


def test_where_texts_part():
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 2, 3), 4) == Difference(4, 2, None, 3)
    assert first_difference((1, 2), (1,)) == Difference(0, 1, 2, None)


def test_the_target_is_asked_how_near_a_tie_was():
    target, prompt = tiny_target(), random_prompt(5)
    logits = target(torch.cat([prompt, torch.tensor([[7, 8]])], dim=1)).logits[0, -1].detach()
    best, second = logits.topk(2).indices.tolist()
    plain = (7, 8, best)
    clear = judge_near_tie(target, prompt, plain, Difference(0, 2, best, second))
    assert clear.logit_gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    assert clear.near_tie is False
    target.lm_head.weight.data[second] = target.lm_head.weight.data[best]
    assert judge_near_tie(target, prompt, plain, Difference(0, 2, best, second)).near_tie is True
    # The same gap is nothing to bfloat16.
    assert rounding(torch.bfloat16, 20.0) > 0.5 > 0.001 > rounding(torch.float32, 20.0)
    assert judge_near_tie(target, prompt, plain, Difference(0, 2, None, 3)).near_tie is None


def test_every_drafter_meets_every_setting():
    assert settings_grid({}) == [{}]
    target = tiny_target()
    drafters = {"a": tiny_drafter("pard", target), "b": tiny_drafter("dflash", target)}
    entries = drafter_entries(drafters, {"tree_budget": [0, 8], "num_assistant_tokens": [3]})
    assert [entry.name for entry in entries] == ["a, chain", "a, tree 8", "b, chain", "b, tree 8"]
    assert entries[3].setting == {"tree_budget": 8, "num_assistant_tokens": 3}
    assert [entry.name for entry in stock_dflash_entries(drafters)] == ["b, stock DFlash loop"]
    with pytest.raises(ValueError, match="needs a DFlash or DFlare drafter among --drafter, got pard"):
        stock_dflash_entries({"a": drafters["a"]})
    loops = [Entry("", drafters["a"], setting).one_at_a_time for setting in ({}, {"decode_loop": "stock"})]
    assert loops == [False, True]


def facts(simulated=False):
    return {
        "simulated": simulated,
        "simulation": {"acceptance": "0.7", "runner_up": 0.0} if simulated else None,
        "machine": "a machine",
        "command": "pardraft eval --target t",
        "date": "2026-01-02T03:04:05Z",
        "versions": {"torch": "2"},
        "target": "t",
        "dtype": "float32",
        "prompts": {"name": "gsm8k", "count": 2, "left_out": 1},
        "max_new_tokens": 4,
        "repeats": 2,
    }


def report(simulated=False, conditions=None):
    plain, drafted = plain_measured(), drafted_measured()
    rows = [
        summarise(each, plain, condition)
        for condition in conditions or [Condition(batch_size=2)]
        for each in (plain, drafted)
    ]
    skipped = [{"name": "assisted", "batch_size": 4, "temperature": 0.0, "reason": "one | at a time"}]
    return Report(facts(simulated), rows, skipped)


def shown(found):
    console = Console(width=80, file=StringIO())
    console.print(screen_table(found), drafts_table(found))
    return console.file.getvalue()


def test_results_are_shown_to_people():
    text, table = markdown(report()), shown(report())
    assert "t on gsm8k (2 prompts, 1 left out), a machine" in text
    assert "| d | 12.0 | 4.00x | 2.00 | 85.7% | 85.7% | 0.0% | 25.0% | 62.5% | 250.00 | yes |" in text
    assert "| d | 100.0% | 66.7% |" in text
    assert "assisted with batch size 4 at temperature 0" in text
    assert all(part in table for part in ("plain", "4.00x", "62.5%", "100 67", "same text", "ms/round"))
    assert "batch" not in table
    several = markdown(report(conditions=(Condition(batch_size=2), Condition(batch_size=2, temperature=1.0))))
    assert "| d | 1 | 12.0 |" in several
    assert "SIMULATED" not in text + table


@pytest.mark.parametrize("width", [20, 50, 60, 80])
def test_a_narrow_terminal_shows_every_name_and_figure(width):
    console = Console(width=width, file=StringIO())
    for table in (screen_table(report()), drafts_table(report())):
        print_table(table, console)
    text = console.file.getvalue()
    assert all(part in text for part in ("plain ", " d ", "tokens/s", "12.0", "4.00x", "250.00", "85.7%", "62.5%"))
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_names_have_room_beside_several_conditions():
    found = report(conditions=[Condition(batch_size=size, temperature=t) for t in (0.0, 1.0) for size in (1, 16)])
    name = "Qwen3-8B-DFlare, tree 60"
    found.rows = [replace(row, name=name) if row.name == "d" else row for row in found.rows]
    console = Console(width=80, file=StringIO())
    console.print(screen_table(found))
    lines = console.file.getvalue().splitlines()
    assert sum(name in line for line in lines) == 4
    headings = [
        "batch 1, temperature 0",
        "batch 16, temperature 0",
        "batch 1, temperature 1",
        "batch 16, temperature 1",
    ]
    assert [line.strip() for line in lines if line.strip().startswith("batch")] == headings
    assert sum("batch 16" in line for line in shown(found).splitlines()) == 4


def test_a_simulation_says_so_everywhere():
    found = report(simulated=True)
    assert markdown(found).startswith("**SIMULATED ACCEPTANCE (0.7)")
    assert "SIMULATED ACCEPTANCE (0.7)" in shown(found)
    assert json.loads(as_json(found))["simulated"] is True


def test_other_texts_are_shown_as_such():
    other = row(texts=((1, 2, 3, 4), (5, 7)))
    assert same_text(other) == "NO (1)"
    assert difference_lines([other]) == [
        "d: 1 other texts, the first in prompt 2 at new token 2 (token 7 instead of token 6)"
    ]
    other.differences[0] = Difference(1, 1, 6, None, 0.01, True)
    assert same_text(other) == "near ties (1)"
    assert (
        "(the end instead of token 6; the target's logits are 0.01 apart, a near tie)" in difference_lines([other])[0]
    )


def test_files_are_written_though_nobody_reads_the_screen(tmp_path):
    class LeftPipe(StringIO):
        def write(self, text):
            raise BrokenPipeError

    outputs = SimpleNamespace(markdown=tmp_path / "r.md", plots=None)
    bench = SimpleNamespace(report=report(), plan=SimpleNamespace(outputs=outputs))
    with pytest.raises((BrokenPipeError, SystemExit)):
        show(bench, Console(file=LeftPipe()), Console(file=StringIO()))
    assert outputs.markdown.read_text(encoding="utf-8") == markdown(report())


def test_tables_are_printed_though_a_file_cannot_be_written(tmp_path):
    outputs = SimpleNamespace(markdown=tmp_path, plots=None)
    bench = SimpleNamespace(report=report(), plan=SimpleNamespace(outputs=outputs))
    screen = Console(file=StringIO())
    with pytest.raises(OSError, match=tmp_path.name):
        show(bench, screen, Console(file=StringIO()))
    assert "tokens/s" in screen.file.getvalue()


def test_json_holds_every_figure():
    found = json.loads(as_json(report()))
    assert found["target"] == "t"
    assert found["skipped"][0]["reason"] == "one | at a time"
    figures = found["rows"][1]
    assert figures["acceptance_by_position"] == pytest.approx([1.0, 2 / 3])
    assert {
        "name",
        "setting",
        "batch_size",
        "temperature",
        "tokens_per_second",
        "speedup",
        "tau",
        "accept",
        "correct",
    } <= set(figures)
    assert {"waste", "shares", "identical", "differences", "milliseconds_by_part"} <= set(figures)


def test_files_are_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file.json"
    write_whole(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "first"
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from hf_pardraft.evaluation.plots import save_plots

    conditions = (Condition(batch_size=2), Condition(batch_size=4))
    paths = save_plots(report(simulated=True, conditions=conditions), tmp_path / "plots")
    assert [path.name for path in paths] == [
        "acceptance_by_position.png",
        "speedup_by_batch_size.png",
        "time_per_round.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    only_plain = Report(facts(), [summarise(plain_measured(), plain_measured(), Condition(batch_size=2))])
    assert save_plots(only_plain, tmp_path / "none") == []


def test_long_names_are_whole_in_plots_and_leave_room_for_what_is_drawn():
    pytest.importorskip("matplotlib")
    from hf_pardraft.evaluation.plots import acceptance_figure, speedup_figure, time_figure

    name = "an-organisation-with-a-name/Qwen3-Coder-30B-A3B-Instruct-DFlare-b16-of-$one$-more-thing, tree 8"
    both = report(conditions=(Condition(batch_size=2), Condition(batch_size=2, temperature=0.7)))
    renamed = [row if row.name == PLAIN else replace(row, name=name) for row in both.rows]
    for draw in (acceptance_figure, speedup_figure, time_figure):
        figure = draw(Report(facts(), renamed))
        figure.draw_without_rendering()
        (axes,), (legend,) = figure.axes, figure.legends
        assert axes.bbox.width > figure.bbox.width / 4
        texts = [*legend.get_texts(), *axes.get_yticklabels()]
        extents = [text.get_window_extent() for text in texts]
        assert all(extent.x0 >= 0 and extent.x1 <= figure.bbox.width for extent in extents)
        assert any("thing" in text.get_text() for text in texts)
