"""Of the reports that benchmarks keep in `--work`, those are taken that were made with the settings that are asked for."""

from argparse import Namespace

import pytest

import evidence
import smollm2_claims


def test_a_trials_reports_are_not_taken_for_another_runs(tmp_path):
    def reports(**changed):
        arguments = {"work": tmp_path, "share": None, "steps": 5, "prompts": 2, "rows": 8, **changed}
        return evidence.reports_of([("PARD COD", 0)], Namespace(**arguments), lambda name, seed: {"tau": 1.5})

    assert reports() == reports() == {"PARD COD": [{"tau": 1.5}]}
    for changed in ({"steps": None}, {"prompts": 50}, {"rows": 4096}):
        with pytest.raises(
            SystemExit, match=r"PARD COD, seed 0\.json was made with .*'steps': 5.*another folder as --work"
        ):
            reports(**changed)
    # What was kept before settings were says nothing of them.
    (tmp_path / "PARD COD, seed 0.json").write_text('{"tau": 1.25}')
    assert reports() == {"PARD COD": [{"tau": 1.25}]}


def test_neither_are_those_of_claims_about_smollm2(tmp_path):
    arguments = Namespace(work=tmp_path, dtype="bfloat16", steps=None, limit=2)
    (tmp_path / "DFlash law, seed 0.json").write_text('{"tau": 1.5, "dtype": "bfloat16", "steps": 300}')
    assert smollm2_claims.run("DFlash law", 0, arguments)["tau"] == 1.5
    (tmp_path / "DFlash law, seed 0.json").write_text('{"tau": 1.5, "dtype": "float32", "steps": 3}')
    with pytest.raises(
        SystemExit, match=r"made with {'dtype': 'float32', 'steps': 3}, not {'dtype': 'bfloat16', 'steps': 300}"
    ):
        smollm2_claims.run("DFlash law", 0, arguments)
