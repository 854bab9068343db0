"""The README's commands are the ones that CI runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_reads_its_four_commands_from_the_readme():
    block = README.split("<!-- ci:begin -->")[1].split("<!-- ci:end -->")[0]
    commands = [line for line in block.splitlines() if line and not line.startswith("```")]
    assert [command.split("#")[0].split()[0] for command in commands] == ["python3", "pip", "pardraft", "pytest"]
    assert "ci:begin" in (ROOT / ".ci" / "run").read_text()


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)
