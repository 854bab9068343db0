"""The figures in docs/ are those of the results files that they name."""

import json
import re
from pathlib import Path
from statistics import mean, median, pstdev

import pytest

from schedule_measure import DEPTHS, TREE_BUDGETS
from schedule_report import best_fixed, row_named, share_of_best, speedup_of, table_by_batch
from smollm2_page import average, cells_of, figures, renewed, rows_named, speedups

ROOT = Path(__file__).parent.parent
KINDS = ("PARD", "DFlash", "DFlare", "DART")


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def prose_of(page: str) -> str:
    """A page of docs/ as if it had one line."""
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page of docs/, as cells, without the line below their heads."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]
    return [[row for row in table if not set("".join(row)) <= set("-")] for table in rows]


def table_of(page: str, *head: str) -> dict[str, list[str]]:
    """The rows of the table whose head begins so, by their first cells."""
    (table,) = [rows[1:] for rows in tables(page) if tuple(rows[0][: len(head)]) == head]
    return {row[0]: row[1:] for row in table}


def numbers(cells: list[str]) -> list[float]:
    return [float(number.replace(",", "")) for cell in cells for number in re.findall(r"\d[\d,]*\.?\d*", cell)]


def test_the_shipped_family():
    rows = {row["name"]: row for row in results("demo_family")["rows"]}
    shown = table_of("performance.md", "", "PARD", "DFlash", "DFlare", "DART")
    endings = (
        "",
        ", trees of 16",
        ", the prompts in one batch",
        ", a file that the target does not know",
    )
    for cells, ending in zip(shown.values(), endings, strict=True):
        expected = [rows[kind + ending][name] for kind in KINDS for name in ("speedup", "tau")]
        assert numbers(cells) == expected


def test_lm_evaluation_harness():
    rows = {row["drafter"]: row for row in results("lm_eval")["rows"]}
    ordered = [rows[name] for name in ("", *map(str.lower, KINDS))]
    score, forwards, seconds = table_of("performance.md", "complete_functions", "plain").values()
    assert numbers(score) == [round(row["exact_match,none"], 4) for row in ordered]
    assert len(set(score)) == 1
    assert numbers(forwards) == [row["forwards"] for row in ordered]
    assert numbers(seconds) == [row["cpu_seconds"] for row in ordered]
    plain, pard = results("lm_eval")["rows_of_batches_of_8"]
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"{plain['cpu_seconds']} seconds without a drafter and {pard['cpu_seconds']} with PARD's" in text
    assert f"{plain['forwards']:,} forwards either way" in text
    assert plain["forwards"] == pard["forwards"]


def test_stories260k():
    rows = {(row["name"], row["temperature"]): row for row in results("stories260k")["rows"]}
    shown = table_of("performance.md", "", "chain of 7 or 8")
    for kind in KINDS:
        measured = [rows[kind + way, t] for t in (0.0, 1.0) for way in ("", ", tree", ", tree + n-gram")]
        assert numbers(shown[kind]) == [round(row[name], 2) for row in measured for name in ("speedup", "tau")]


def decode_rows(target: str) -> dict[str, dict]:
    (run,) = [run for run in results("decode")["runs"] if run["target"] == target]
    return {row["name"]: row for row in run["rows"]}


def test_compiled_rounds():
    shown = [
        {row[0]: row[1:] for row in table[1:]}
        for table in tables("performance.md")
        if table[0][1:2] == ["chain: eager"]
    ]
    for target, table in zip(("demo", "stories260k"), shown, strict=True):
        rows = decode_rows(target)
        for kind in KINDS:
            expected = []
            for shape in ("", ", tree 16"):
                eager, compiled = rows[f"{kind}, ours{shape}"], rows[f"{kind}, ours compiled{shape}"]
                expected += [round(eager["tokens_per_second"]), round(compiled["tokens_per_second"])]
                expected += [round(compiled["speedup"], 2), round(compiled["speedup_over_compiled"], 2)]
            assert numbers(table[kind]) == pytest.approx(expected, abs=0.0051)


def test_efficiency():
    shown = table_of("performance.md", "efficiency, chain / tree")
    for name, target in (("stories260K", "stories260k"), ("demo target", "demo")):
        rows = decode_rows(target)
        for way, ours in (("compiled", "ours compiled"), ("uncompiled", "ours")):
            found = [rows[f"{kind}, {ours}{shape}"]["efficiency"] for kind in KINDS for shape in ("", ", tree 16")]
            assert numbers(shown[f"{name}, {way}"]) == pytest.approx(found, abs=0.0051)


def test_speed_by_batch_size():
    found = {
        run["batch_size"]: row["speedup"]
        for run in results("decode_batches")["runs"]
        for row in run["rows"]
        if row["name"] == "DFlash, ours compiled"
    }
    shown = table_of("performance.md", "batch", "1", "2")["compiled chain"]
    assert numbers(shown) == pytest.approx([found[size] for size in sorted(found)], abs=0.0051)


def test_what_a_round_costs_besides_its_models():
    rows = {(row["loop"], row["target"], row["setting"]): row for row in results("loop_overhead")["rows"]}
    (table,) = [rows for rows in tables("performance.md") if rows[0][1:2] == ["operations"]]
    measured = (
        ("ours", "greedy chain 8, rate 0.8"),
        ("stock DFlash", "greedy chain 8, rate 0.8"),
        ("ours", "temperature + top-p chain 8, rate 0.8"),
        ("stock DFlash", "temperature + top-p chain 8, rate 0.8"),
        ("ours", "greedy tree 60x8, rate 0.8"),
    )
    for cells, (loop, setting) in zip(table[1:], measured, strict=True):
        row = rows[loop, "stories260K", setting]
        shown = numbers(cells[1:])
        assert shown[0] == round(row["ops_per_round"])
        assert shown[1:] == pytest.approx([row["syncs_per_round"], row["efficiency"]], abs=0.051)


def test_what_one_set_of_steps_would_cost():
    rows = {(row["target"], row["loop"], row["setting"]): row for row in results("static_steps")["rows"]}
    (table,) = [rows[1:] for rows in tables("architecture.md") if rows[0][1:2] == ["operations a round"]]
    measured = [(target, loop) for target in ("stories260K", "random 100M") for loop in ("ours", "static steps")]
    for cells, (target, loop) in zip(table, measured, strict=True):
        row = rows[target, loop, "greedy chain 8, rate 0.8"]
        assert numbers(cells[1:]) == pytest.approx([round(row["ops_per_round"]), row["efficiency"]], abs=0.0051)


def test_ngram_models():
    built = {
        row["order"]: row
        for row in results("ngram")["building"]["rows"]
        if (row["max_memory"], row["min_count"]) == ("1GB", 1)
    }
    searched = {row["order"]: row for row in results("ngram")["looking_up"]["rows"]}
    for order, cells in table_of("performance.md", "order").items():
        row, found = built[int(order)], searched[int(order)]
        expected = [
            row["tokens_per_core_second"] / 1e6,
            row["bytes_per_longest_ngram"],
            found["walk_median_us_a_level"],
        ]
        assert numbers(cells) == pytest.approx(expected, abs=0.051)


def test_fresh_drafters():
    settings = results("training_defaults")["settings"]
    (table,) = [rows[1:] for rows in tables("experiments.md") if rows[0][1:2] == ["loss at the start"]]
    for cells, name in zip(table, ("DFlash", "DFlash, before", "DFlare", "DFlare, before"), strict=True):
        found = [settings[name][what]["mean"] for what in ("loss 0", "tau 100", "tau 300", "tau 1000")]
        assert numbers(cells[1:]) == pytest.approx(found, abs=0.0051)


def test_claims():
    settings = results("evidence")["settings"]

    def tau(name: str) -> float:
        return round(settings[name]["tau"]["mean"], 2)

    shown = {row[0]: row[2] for rows in tables("experiments.md") if rows[0][0] == "claim" for row in rows[1:]}
    losses = [tau(f"DFlash {name}") for name in ("uniform", "decay", "decay + focal", "decay + focal + chain")]
    assert numbers([shown["decay, focal loss, chain reward add up"]]) == losses
    gammas = [tau(f"DART gamma {gamma / 10}") for gamma in range(5, 11)]
    assert numbers([shown["DART: gamma 0.6 is best"]]) == [0.5, 1.0, *gammas]
    growing = [tau("DFlare gamma 4.5 to 9.5"), tau("DFlare gamma 4.5")]
    assert numbers([shown["a growing gamma beats a fixed one"]]) == growing
    other = [round(settings["PARD COD"]["tau on the other"]["mean"], 2), tau("PARD COD")]
    assert numbers([shown["one PARD drafter serves another target"]]) == other
    assert numbers([shown["COD loses no tau (K = 4)"]])[0] == round(settings["PARD COD, K = 4"]["tau 4"]["mean"], 2)


def test_the_shipped_familys_tau_on_held_out_text():
    facts = json.loads((ROOT / "src/hf_pardraft/demo/family/family.json").read_text())
    shown = table_of("experiments.md", "", "shipped")
    for kind in KINDS:
        assert float(shown[kind][1]) == pytest.approx(facts[kind.lower()]["held_out_expected_tau"], abs=0.0051)


def test_how_rarely_rounding_makes_another_text():
    text = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    summaries = results("sampled_text")["differences"]
    for summary in summaries:
        assert f"{summary['tokens']:,}" in text, summary


def test_tau_of_sampled_text():
    rows = {
        (row["source"] == "before", row["temperature"], row["name"]): row for row in results("sampled_text")["rows"]
    }
    for kind, cells in table_of("performance.md", "sampled").items():
        expected = [
            rows[was, temperature, f"{kind}, {way}"]["tau"]
            for temperature in (1.0, 0.7)
            for way, was in (("chain", True), ("chain", False), ("rejection", False), ("tree", True), ("tree", False))
        ]
        assert numbers(cells) == pytest.approx(expected, abs=0.0051)


def swept(condition: dict) -> tuple[set[int], set[int]]:
    """The depths of a sweep's fixed settings, and their tree budgets."""
    depths, budgets = (
        {row["setting"][key] for row in condition["sweep"]} for key in ("num_assistant_tokens", "tree_budget")
    )
    return depths, budgets


def test_the_schedule():
    page, conditions = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), results("schedule")["conditions"]
    assert table_by_batch(conditions) in page
    unwrapped = prose_of("performance.md")
    autos, firsts = ([speedup_of(condition, way) for condition in conditions] for way in ("auto", "auto, first call"))
    assert f"in all {len(conditions)} conditions ({min(autos):.2f}x is the least)" in unwrapped
    num_slower = sum(first < 0.97 for first in firsts)
    assert f"has {min(firsts):.2f}x at worst, and less than 0.97 in {num_slower} conditions" in unwrapped
    paying = [each for each in conditions if speedup_of(each, "best") > 1]
    shares = [share_of_best(each) for each in paying]
    most, many, nearly_all = (sum(share >= bound for share in shares) for bound in (0.97, 0.95, 0.9))
    assert f"at least 0.97 of it in {most} of {len(paying)}, 0.95 in {many}, 0.90 in {nearly_all}," in unwrapped
    assert f"and {min(shares):.2f} at worst, in the mean {mean(shares):.2f}." in unwrapped
    of_sizes = [
        median(share for share, each in zip(shares, paying, strict=True) if each["batch_size"] == size)
        for size in (1, 4, 16, 64)
    ]
    single, of_four, of_many, of_most = (f"{share:.2f}" for share in of_sizes)
    assert f"single texts have {single}, batches of 4 {of_four}, of 16 {of_many}, of 64 {of_most}." in unwrapped
    assert all(row["same_text"] for condition in conditions for row in condition["rows"])
    present, of_one_text, of_batches = (
        sum(since <= condition["date"] < until for condition in conditions)
        for since, until in (
            ("2026-11-29T22:39", "2026-12"),
            ("2026-11-29T21:59", "2026-11-29T22:39"),
            ("2026-11-29T19:30", "2026-11-29T21:59"),
        )
    )
    assert f"was measured: {present} by the present schedule" in unwrapped
    assert f"{of_one_text} more, the other single texts, by one" in unwrapped
    assert f"{of_batches}, the family in batches of 4 and 16" in unwrapped
    late = next(each for each in conditions if (each["case"], each["temperature"]) == ("family on other code/PARD", 0))
    turns = {row["name"]: row["turn_speedups"] for row in late["rows"]}
    of_best = [auto / best for auto, best in zip(turns["auto"], turns["default"], strict=True)]
    assert max(of_best[:4]) < 0.8 < 0.92 < min(of_best[4:])
    drawn = [each for each in conditions if (each["temperature"], each["batch_size"]) == (1, 1)]
    drawn = [each for each in drawn if each["case"] in [f"stories260K/{kind}" for kind in KINDS]]
    depth, best, auto = ([speedup_of(condition, way) for condition in drawn] for way in ("default", "best", "auto"))
    assert f"{min(depth):.2f} to {max(depth):.2f} in a [later" in page
    assert f"setting there has {min(best):.2f} to {max(best):.2f}, and" in page
    assert f"is faster, {min(auto):.2f} to {max(auto):.2f}." in page
    assert {condition["rows"][0]["turns"] for condition in conditions} == {5, 7}
    for condition in conditions:
        depths, budgets = swept(condition)
        small = {2, 4, 6, max(depths, default=0)}, {0, 8} if condition["batch_size"] == 64 else {0, 8, 16}
        assert (depths, budgets) == (small if condition["pays"] else (set(), set()))


def test_how_well_the_schedules_benchmark_tells_settings_from_each_other():
    """The chain of the drafter's own depth has a row of its own where it is among the best of the sweep."""
    ratios = []
    for condition in results("schedule")["conditions"]:
        depths, _ = swept(condition)
        named = row_named(condition, f"chain {max(depths, default=0)}")
        if named:
            ratios.append(row_named(condition, "default")["speedup"] / named["speedup"])
    page = prose_of("performance.md")
    assert f"{len(ratios)} settings were measured twice" in page
    assert f"differ by {100 * pstdev(ratios):.0f} % (a standard deviation)" in page
    assert f"and once by {100 * max(abs(ratio - 1) for ratio in ratios):.0f}" in page


def test_a_larger_sweep_of_fixed_settings():
    """Of chains and trees: what those of the schedule's table have of the best of all."""
    found = []
    for condition in results("schedule_full_sweep")["conditions"]:
        depths, budgets = swept(condition)
        most = max(depths)
        # Of at most 1024 tokens at once.
        budgets_that_fit = {budget for budget in TREE_BUDGETS if condition["batch_size"] * (1 + budget) <= 1024}
        assert (depths, budgets) == ({depth for depth in (*DEPTHS, most) if depth <= most}, {0, *budgets_that_fit})
        best = max(row["speedup"] for row in condition["sweep"])
        few = (
            row
            for row in condition["sweep"]
            if row["setting"]["num_assistant_tokens"] in (2, 4, 6, most) and row["setting"]["tree_budget"] in (0, 8, 16)
        )
        best_of_few = max(row["speedup"] for row in few)
        if best > 1:
            found.append(best_of_few / best)
    page = prose_of("performance.md")
    assert f"in {sum(round(share, 2) == 1 for share in found)} of {len(found)} conditions" in page
    assert f"and has {min(found):.2f} of it at least" in page


def test_the_schedule_compiled():
    shown = table_of("performance.md", "over plain `generate` compiled, as it is")
    conditions, autos = results("schedule_compiled")["conditions"], []
    for condition in conditions:
        rows = {row["name"]: row["speedup"] for row in condition["rows"]}
        assert all(row["same_text"] for row in condition["rows"])
        best = max(row["speedup"] for row in condition["rows"] if row["is_fixed"])
        autos.append(rows["auto"])
        cells = shown.pop(f"{condition['case']}, T={condition['temperature']:.0f}")
        assert numbers(cells) == pytest.approx([best, rows["default"], rows["auto"]], abs=0.0051)
    assert not shown
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"({min(autos):.2f}x is the least)" in page
    warm = [auto for auto, condition in zip(autos, conditions, strict=True) if condition["temperature"] == 1]
    assert f"at temperature 1 the best has {max(warm):.2f}x" in page
    greedy = [each for each in conditions if each["temperature"] == 0 and each["pays"]]
    for way in ("best", "default"):
        shares = [speedup_of(condition, "auto") / speedup_of(condition, way) for condition in greedy]
        assert f"{min(shares):.2f} to {max(shares):.2f}" in page


@pytest.mark.parametrize(
    ("name", "label", "keys"),
    [("peers", "", ["speedup", "tau"]), ("peers_two_cores", ", two cores", ["speedup"])],
)
def test_published_loops(name, label, keys):
    rows = {row["name"]: row for row in results(name)["rows"]}
    assert all(row["same_text"] for row in rows.values())
    theirs = [row for row in rows.values() if "ours_over_it" in row]
    shown = table_of("performance.md", f"loop, over plain `generate`{label}")
    for row, cells in zip(theirs, shown.values(), strict=True):
        figures = [way[key] for way in (row, rows[row["ours"]]) for key in keys]
        assert numbers(cells) == pytest.approx([*figures, row["ours_over_it"]], abs=0.0051)


STEPS = [
    ("", 128, "a step, `num_anchors=128`"),
    ("_avx512_bf16", 512, "a step, `num_anchors=512`"),
    ("_two_cores", 512, "a step, `num_anchors=512`, two cores"),
    ("_pard_dart", 512, "a step of PARD or DART"),
]


@pytest.mark.parametrize(("suffix", "anchors", "head"), STEPS)
def test_training_steps(suffix, anchors, head):
    shown = table_of("training.md", head)
    for row in results(f"training_step{suffix}")["rows"]:
        assert row["anchors"] == anchors
        seconds = [sum(row[when][part] for part in ("forward", "backward")) for when in ("before", "now")]
        cells = shown.pop(f"{row['drafter']}, {row['dtype']}")
        figures = [*seconds, row["time_ratio"], row["memory_ratio"]]
        assert numbers(cells[:4]) == pytest.approx(figures, abs=0.0051)
        assert float(cells[4]) == pytest.approx(row["gradient_difference"], rel=0.5)
    assert not shown


WRITING = [("", "", 244), ("_without_amx", ", without AMX", 79), ("_avx512_bf16", ", with AVX512_BF16", 170)]


@pytest.mark.parametrize(("suffix", "label", "unlike"), WRITING)
def test_writing_training_text(suffix, label, unlike):
    shown = table_of("training.md", f"tokens a second{label}", "bfloat16", "over plain").values()
    found = [results(f"writing_{dtype}{suffix}")["results"][0] for dtype in ("bfloat16", "float32")]
    for way, cells in zip(("plain", "after", "compiled", "limit"), shown, strict=True):
        assert numbers(cells) == [
            figure for row in found for figure in (row[way]["tokens_a_second"], row[way].get("times_plain", 1.0))
        ]
    assert [row["compiled"]["texts_unlike_plain"] for row in found] == [unlike, 0]


def test_writing_training_text_on_two_cores():
    shown = table_of("training.md", "tokens a second, two cores").values()
    (row,) = results("writing_bfloat16_two_cores")["results"]
    for way, cells in zip(("plain", "after", "compiled", "limit"), shown, strict=True):
        assert numbers(cells) == [row[way]["tokens_a_second"], row[way].get("times_plain", 1.0)]


@pytest.mark.parametrize(("name", "label"), [("text_lookup", ""), ("text_lookup_two_cores", ", two cores")])
def test_branches_from_the_text(name, label):
    shown = table_of("decoding.md", f"Spec-Bench{label}")
    runs = [run for run in results(name)["runs"] if run["drafters"] == ["DART"]]
    for run, (category, cells) in zip(runs, shown.items(), strict=True):
        assert category == run["category"].replace("_", " ")
        rows = {row["name"]: row for row in run["rows"]}
        ways = [rows[name] for name in ("prompt lookup", "DART, auto", "DART and the text, auto")]
        assert numbers(cells) == [row[figure] for row in ways for figure in ("speedup", "tau")]


def test_a_gguf_target():
    rows = results("gguf_target")["rows"]
    text = prose_of("decoding.md")
    for way in ("plain", "chain", "auto"):
        greedy, drawn = (row for row in rows if row["way"] == way)
        assert greedy["same_text"]
        assert drawn["same_text"]
        assert f"{greedy['tokens_per_second']:.1f} / {drawn['tokens_per_second']:.1f}" in text


def test_the_score_of_a_tree():
    entries = results("tree_scoring")["entries"]
    found = {(each["drafter"], each["temperature"], each["budget"]): each for each in entries}
    shown = table_of("performance.md", "tokens a round")
    assert len(shown) == 2 * len(KINDS)
    for drafter, cells in shown.items():
        cases = [found[drafter, temperature, budget] for temperature in (0.0, 1.0) for budget in (8, 16, 60)]
        expected = [case[scoring] for case in cases for scoring in ("probability", "dart")]
        assert numbers(cells) == pytest.approx(expected, abs=0.006)
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for temperature, phrase in ((0.0, "is\\s+ahead in"), (1.0, "temperature 1 in")):
        of_it = [each for each in entries if each["temperature"] == temperature]
        ahead = sum(each["dart"] > each["probability"] for each in of_it)
        assert re.search(rf"{phrase} {ahead} of {len(of_it)}", text)


def test_draft_vocabularies():
    rows = results("draft_vocabulary_stories260k")["rows"]
    found = {name: {row["tokens"]: row for row in rows if row["drafter"] == name} for name in ("DFlash", "PARD")}
    shown = table_of("performance.md", "tokens proposed")
    assert shown.keys() == found["PARD"].keys()
    for size, cells in shown.items():
        known = round(100 * found["DFlash"][size]["text_known"], 1)
        assert numbers(cells) == [known, *(round(found[name][size]["tau"], 2) for name in ("DFlash", "PARD"))]


@pytest.mark.parametrize(("suffix", "label"), [("", ""), ("_two_cores", ", two cores")])
def test_what_drafts_of_a_vocabulary_cost(suffix, label):
    rows = results(f"draft_vocabulary{suffix}")["rows"]
    shown = table_of("performance.md", f"rows of the head{label}")
    assert 2 * len(shown) == len(rows)
    for size, cells in shown.items():
        of_size = [row for row in rows if row["tokens"] == size]
        expected = [(1000 * row["draft"], 1000 * row["tree"], row["of_limit"]) for row in of_size]
        assert numbers(cells) == pytest.approx([value for row in expected for value in row], abs=0.051)


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("memory_limit", ""),
        ("memory_limit_amx", ", with AMX"),
        ("memory_limit_avx512_bf16", ", with AVX512_BF16"),
    ],
)
def test_near_the_memorys_speed(name, suffix):
    rows = {
        (*entry.split(", ")[:3], row["way"], row.get("tokens")): row
        for entry, measured in results(name).items()
        if entry.endswith(", 1 threads")
        for row in measured["rows"]
    }
    cases = [(dtype, f"{layers} layers") for dtype in ("bfloat16", "float32") for layers in (10, 30)]
    shown = table_of("performance.md", f"milliseconds for 1 / 8 / 16 tokens (8 over 1){suffix}")
    assert {*shown} == {way for part, *_, way, _ in rows if part == "forwards"}
    for way, cells in shown.items():
        expected = []
        for case in cases:
            expected += [rows[("forwards", *case, way, tokens)]["milliseconds"] for tokens in (1, 8, 16)]
            expected.append(rows[("forwards", *case, way, 8)]["over_one_token"])
        assert numbers(cells) == pytest.approx(expected, abs=0.051)
    shown = table_of("performance.md", f"tokens a second (over the best plain way){suffix}")
    assert {*shown} == {way for part, *_, way, _ in rows if part == "generate"}
    for way, cells in shown.items():
        found = [rows[key] for case in cases if (key := ("generate", *case, way, None)) in rows]
        assert numbers(cells) == [row[key] for row in found for key in ("tokens_per_second", "over_best_plain")]
    assert all(row["text_is_plain"] for (part, *_), row in rows.items() if part == "generate")


def test_near_the_memorys_speed_on_two_cores():
    entries = {name: entry for name, entry in results("memory_limit").items() if name.endswith(", 2 threads")}
    shown = table_of("performance.md", "milliseconds for 1 / 8 / 16 tokens (8 over 1), two cores")
    expected: dict[str, list[float]] = {}
    for dtype in ("bfloat16", "float32"):
        for row in entries[f"forwards, {dtype}, 30 layers, 2 threads"]["rows"]:
            expected.setdefault(row["way"], []).append(row["milliseconds"])
        for row in entries[f"forwards, {dtype}, 30 layers, 2 threads"]["rows"]:
            if row["tokens"] == 8:
                expected[row["way"]].append(row["over_one_token"])
    assert {*shown} == {*expected}
    for way, cells in shown.items():
        assert numbers(cells) == pytest.approx(expected[way], abs=0.051)
    shown = table_of("performance.md", "tokens a second (over the best plain way), two cores")
    measured = [entries[f"generate, {dtype}, 10 layers, 2 threads"]["rows"] for dtype in ("bfloat16", "float32")]
    for rows in zip(*measured, strict=True):
        figures_of_way = [row[key] for row in rows for key in ("tokens_per_second", "over_best_plain")]
        assert numbers(shown.pop(rows[0]["way"])) == figures_of_way
        assert all(row["text_is_plain"] for row in rows)
    assert not shown


def test_round_attention():
    rows = {(row["shape"], row["tokens"], row["dtype"], row["text"]): row for row in results("round_attention")["rows"]}
    shown = table_of("performance.md", "microseconds copied / shared / ours")
    for name, cells in shown.items():
        shape, tokens = name.split(", ")
        of_it = [row for key, row in rows.items() if key[:2] == (shape, int(tokens))]
        figures = [row[key] for row in of_it for key in ("copied", "shared", "kernel", "faster")]
        assert numbers(cells) == pytest.approx(figures, abs=0.51)
    assert len(shown) * 4 == len(rows)


@pytest.mark.parametrize(("name", "begins"), [("", "Our kernel"), ("_two_cores", "it")])
def test_how_much_faster_attention_of_a_round_is(name, begins):
    rows = results(f"round_attention{name}")["rows"]
    page = prose_of("performance.md")
    said = (
        (("float32", {1, 8, 17}), f"{begins} is {{:.1f}} to {{:.1f}} times as fast as the faster of both in float32"),
        (("bfloat16", {8, 17}), "in bfloat16 {:.1f} to {:.1f} times for several tokens"),
        (("bfloat16", {1}), "and {:.0f} to {:.0f} times for one"),
    )
    for (dtype, tokens), sentence in said:
        faster = [row["faster"] for row in rows if row["tokens"] in tokens and row["dtype"] == dtype]
        assert sentence.format(min(faster), max(faster)) in page


def test_serving():
    rows = {(row["server"], row["clients"]): row for row in results("serving")["rows"]}
    shown = table_of("serving.md", "", "one client: tokens/s")
    plain = next(iter(shown))
    for name, cells in shown.items():
        expected = []
        for clients in (1, 3):
            for quantity in ("tokens_per_second", "processor_ms_per_token"):
                found, without = rows[name, clients][quantity], rows[plain, clients][quantity]
                ratio = found / without if quantity == "tokens_per_second" else without / found
                expected += [found] if name == plain else [found, ratio]
        assert numbers(cells) == pytest.approx(expected, abs=0.051)
    assert [(name, clients) for clients in (1, 3) for name in shown] == [*rows]
    assert all(row["same_answers"] for row in rows.values())


def test_smollm2():
    file = ROOT / "benchmarks" / "results" / "smollm2.json"
    result = json.loads(file.read_text()) if file.exists() else {"cells": []}
    page = (ROOT / "docs" / "smollm2.md").read_text(encoding="utf-8")
    assert renewed(page, result) == page


WAYS = ("chain", "tree", "auto", "chain, compiled", "tree, compiled", "auto, compiled")


def counts_of(cells: dict[str, dict]) -> list[int]:
    """Texts, those that are not plain's, and of these such as part from it at a near tie."""
    rows = [row for cell in cells.values() for row in cell["rows"]]
    return [sum(row[count] or 0 for row in rows) for count in ("texts", "different", "near_ties")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiled_rounds_of_smollm2(dtype):
    result, page = results("smollm2"), prose_of("smollm2.md")
    greedy, sampled = (
        cells_of(result, "speed", dtype=dtype, temperature=temperature, batch_size=1) for temperature in (0.0, 1.0)
    )
    assert len(greedy) == len(sampled) == 6
    columns = [(greedy, way) for way in WAYS] + [(sampled, "auto"), (sampled, "auto, compiled")]
    shown, named = table_of("smollm2.md", f"over plain `generate` compiled, {dtype}"), {}
    for drafter, values in shown.items():
        named[drafter] = [average(speedups(cells, rows_named(cells)[f"{drafter}, {way}"])) for cells, way in columns]
        assert numbers(values) == pytest.approx(named[drafter], abs=0.0051)
    assert {*shown} == {*KINDS}
    fastest = sorted(KINDS, key=lambda drafter: -named[drafter][5])
    assert ", ".join(f"{drafter} by {named[drafter][5]:.2f}x" for drafter in fastest) in page
    for cells in (greedy, sampled):
        # The best plain way.
        assert set(speedups(cells, rows_named(cells)["plain, compiled"])) == {1.0}
    least = min(
        value
        for cells in (greedy, sampled)
        for name, rows in rows_named(cells).items()
        for value in speedups(cells, rows)
        if ", auto" in name and "without" not in name
    )
    assert f"({dtype}: {least:.2f}x)" in page
    texts, different, ties = counts_of(greedy)
    assert different == ties
    assert f"{dtype}: {different} of {texts} at temperature 0" in page


def test_the_best_fixed_way_in_batches_of_smollm2():
    result, page = results("smollm2"), prose_of("smollm2.md")
    best = []
    for dtype in ("bfloat16", "float32"):
        cells = cells_of(result, "speed", dtype=dtype, temperature=0.0, batch_size=4)
        found = {name: average(speedups(cells, rows)) for name, rows in rows_named(cells).items()}
        way = max((name for name in found if "auto" not in name), key=found.get)
        assert way == "DART, chain"
        best.append(f"{found[way]:.2f}x")
    assert f"The best fixed way, DART's chains, has {best[0]} and {best[1]} at temperature 0" in page


@pytest.mark.parametrize(
    ("file", "machine"), [("smollm2_without_amx", "without AMX"), ("smollm2_avx512_bf16", "with AVX512_BF16")]
)
def test_smollm2_in_bfloat16_without_matrix_units(file, machine):
    result, page = results(file), (ROOT / "docs" / "smollm2.md").read_text(encoding="utf-8")
    greedy, sampled = (
        cells_of(result, "speed", dtype="bfloat16", temperature=temperature, batch_size=1) for temperature in (0.0, 1.0)
    )
    assert len(greedy) == len(sampled) == 6
    shown = table_of("smollm2.md", f"over plain `generate` compiled, bfloat16 {machine}")
    least = []
    for name, values in shown.items():
        found = []
        for cells in (greedy, sampled):
            rows = rows_named(cells)
            for way in [name] if name == "prompt lookup" else [f"{name}, auto", f"{name}, auto, compiled"]:
                found.append(average(speedups(cells, rows[way])))
                if name != "prompt lookup":
                    least += speedups(cells, rows[way])
        assert numbers(values) == pytest.approx(found, abs=0.0051)
        assert set(speedups(greedy, rows_named(greedy)["plain, compiled"])) == {1.0}
    assert {*shown} == {*KINDS, "prompt lookup"}
    assert f"the least is {min(least):.2f}x" in " ".join(page.split())


def test_smollm2_training():
    runs = {run["name"]: run for run in results("smollm2_training")["runs"]}
    shown = table_of("smollm2.md", "", "steps")
    assert {*shown} == {*KINDS}
    for name, cells in shown.items():
        run, evaluation = runs[name], runs[name]["evaluation"]
        right = [round(100 * evaluation[f"accuracy_{place}"]) for place in (1, 2, 3)]
        facts = [run["steps"], round(run["epochs"], 1), round(run["seconds"] / 60), round(evaluation["loss"], 2)]
        assert numbers(cells) == [*facts, *right, round(evaluation["expected_tau"], 2)]


def test_the_schedule_by_a_modelled_clock():
    shown = table_of("performance.md", "over plain `generate`, modelled")
    conditions = results("schedule_modelled")["conditions"]
    assert len(shown) == len(conditions) == 8
    for condition in conditions:
        best, auto = best_fixed(condition)["speedup"], row_named(condition, "auto")["speedup"]
        cells = shown[f"{condition['case']}, T={condition['temperature']:g}"]
        assert [cells[0].split()[0], *cells[1:]] == [f"{best:.2f}x", f"{auto:.2f}x", f"{auto / best:.2f}"]
        assert all(row["same_text"] for row in condition["rows"])


# Rows of the page's tables of claims, and what the benchmark calls them.
CLAIMS = {
    "cross-entropy, all positions alike": "DFlash uniform",
    "decay (gamma 3)": "DFlash decay",
    "first-error focal loss": "DFlash focal",
    "chain reward": "DFlash chain",
    "decay, focal loss and chain reward": "DFlash all three",
    "KL to the target's law, decay": "DFlash law",
    "two layers, DFlare: a sum of the taps by layer": "DFlare by layer, 2 layers",
    'two layers, one projection of all taps (`fusion="fc"`)': "DFlare one projection, 2 layers",
    "two layers, a sum by layer and a projection of it (`fusion_fc`)": "DFlare by layer and projection, 2 layers",
    "four layers, a sum by layer (float32)": "DFlare by layer, 4 layers",
    "four layers, one projection (float32)": "DFlare one projection, 4 layers",
    "four layers, a sum by layer and a projection of it (float32)": "DFlare by layer and projection, 4 layers",
    "DART, shifted logits": "DART shifted",
    "DART, unshifted": "DART unshifted",
    "PARD with COD": "PARD COD",
    "PARD with all masks": "PARD all masks",
}


@pytest.mark.parametrize(
    ("head", "columns"),
    [
        (("DFlash, and 300 steps with",), ("tau", "chain_tau", "tree_tau", "tree_gain")),
        (
            ("", "expected tau", "right at positions 1 to 3, %", "chain"),
            ("tau", ("accuracy_1", "accuracy_2", "accuracy_3"), "chain_tau", "tree_tau"),
        ),
        (
            ("", "expected tau", "right at positions 1 to 3, %", "steps, seconds"),
            ("tau", ("accuracy_1", "accuracy_2", "accuracy_3")),
        ),
    ],
)
def test_smollm2_claims(head, columns):
    settings = results("smollm2_claims")["settings"]
    for name, cells in table_of("smollm2.md", *head).items():
        runs = settings[CLAIMS[name]]["runs"]
        assert len(runs) == 2, name
        for column, cell in zip(columns, cells, strict=False):
            if isinstance(column, tuple):
                shown = "; ".join(", ".join(f"{100 * run[each]:.0f}" for each in column) for run in runs)
            else:
                shown = ", ".join(f"{run[column]:.2f}" for run in runs)
            assert cell == shown, name


BEGINNINGS = {
    "as in the claims above": "DFlash from layers",
    "a learning rate of 3e-4": "DFlash from layers, learning rate 3e-4",
    "a learning rate of 3e-3": "DFlash from layers, learning rate 3e-3",
    "blocks of 4": "DFlash from layers, blocks of 4",
    "others' text in its place": "DFlash from layers, others' text",
    "others' text, and then the target's": "DFlash from layers, others' text, then own",
    "the same text, and then once more": "DFlash from layers, own text, then own",
    "four layers": "DFlash from layers, 4 layers",
    "one layer rather than two": "DFlash from layers, 1 layer",
    "cross-entropy rather than KL": "DFlash from layers, cross-entropy",
    "blocks of 16": "DFlash from layers, blocks of 16",
    "gamma 1.5 rather than 3": "DFlash from layers, gamma 1.5",
    "eight taps": "DFlash from layers, 8 taps",
    "gamma 6 rather than 3": "DFlash from layers, gamma 6",
    "three taps": "DFlash from layers, 3 taps",
}


def test_smollm2_beginnings():
    settings = results("smollm2_claims")["settings"]
    shown = table_of("smollm2.md", "300 steps from the target's layers")
    assert shown.keys() == BEGINNINGS.keys()
    for name, cells in shown.items():
        runs = settings[BEGINNINGS[name]]["runs"]
        right = (", ".join(f"{100 * run[f'accuracy_{position}']:.0f}" for position in (1, 2, 3)) for run in runs)
        tau, chain, tree = (", ".join(f"{run[kind]:.2f}" for run in runs) for kind in ("tau", "chain_tau", "tree_tau"))
        assert cells == [tau, "; ".join(right), chain, tree]


def test_smollm2_learned_from_its_own_answers():
    settings = results("smollm2_claims")["settings"]
    shown = table_of("smollm2.md", "learned from")
    for row, answers in {"GSM8K's own answers": "GSM8K's answers", "the target's": "the target's answers"}.items():
        runs = [settings[f"{name}, {answers}"]["runs"] for name in ("PARD COD", "DFlash decay")]
        assert shown[row] == [
            ", ".join(f"{run[tau]:.2f}" for run in of_setting)
            for of_setting in runs
            for tau in ("chain_tau", "tree_tau")
        ]


def test_smollm2_on_the_readme():
    cells = cells_of(results("smollm2"), "speed", dtype="bfloat16", temperature=0.0, batch_size=1)
    named = rows_named(cells)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ways = (
        ("as it comes, compiled", "auto, compiled"),
        ("as it comes", "auto"),
        ("the drafter alone", "auto without text"),
    )
    for label, way in ways:
        rows = [named[f"{kind}, {way}"] for kind in KINDS]
        shown = (f"{average(speedups(cells, row)):.2f}x ({average(figures(row, 'tau')):.2f})" for row in rows)
        assert f"| {label} | {' | '.join(shown)} |" in text
    assert f"prompt lookup: {average(speedups(cells, named['prompt lookup'])):.2f}x)" in text
