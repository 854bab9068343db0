"""Run in a process of its own by test_push.py, which says with HF_ENDPOINT where the stand-in for the Hub is.

python publishing.py WORK    # folders `drafter` and `measured`; prints as JSON what came of it
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel

from hf_pardraft import AutoDrafter
from in_process import pardraft

TOKEN = "hf_right"


def ended(*arguments) -> dict:
    done = pardraft(*arguments)
    return {"code": done.code, "output": done.out, "error": done.error if done.code else ""}


def main(work: Path) -> None:
    drafter = AutoDrafter.from_pretrained(work / "drafter")
    found = {}
    push = ["push", work / "drafter", "someone/drafter"]
    found["unmeasured"] = ended(*push, "--token", TOKEN)
    found["wrong_token"] = ended(*push, "--allow-unmeasured", "--token", "hf_wrong")
    found["push"] = ended(*push, "--allow-unmeasured", "--token", TOKEN, "--private", "--message", "The first")
    found["branch"] = ended("push", work / "measured", "someone/drafter", "--token", TOKEN, "--revision", "dev")
    loaded = AutoDrafter.from_pretrained("someone/drafter", token=TOKEN)
    found["same"] = all(torch.equal(w, drafter.state_dict()[name]) for name, w in loaded.state_dict().items())
    found["by_auto_model"] = type(AutoModel.from_pretrained("someone/drafter", token=TOKEN)).__name__
    # What was loaded from one repository is pushed to another, and must not go on naming the first one's code.
    loaded.push_to_hub("someone/second", token=TOKEN, private=True, tags=["fast"], commit_message="Moved")
    drafter.push_to_hub("someone/drafter", token=TOKEN)
    drafter.save_pretrained(work / "measured", push_to_hub=True, repo_id="someone/third", token=TOKEN)
    averaged = {name: weight + 1 for name, weight in drafter.state_dict().items()}
    options = {"state_dict": averaged, "with_code": False, "push_to_hub": True}
    for variant in (None, "fp16"):
        drafter.save_pretrained(work / "averaged", repo_id="someone/averaged", token=TOKEN, variant=variant, **options)
    for repository in ("someone/earlier", "someone/earlier-too"):
        drafter.push_to_hub(repository, token=TOKEN)
    found["over"] = ended("push", work / "measured", "someone/earlier", "--token", TOKEN)
    Path(work / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
