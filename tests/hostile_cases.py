"""Commands on the tiny family and good input, to which tests add what no command can follow; run in the fixture `in_work`."""

from pathlib import Path

DEEP = "[" * 100_000 + "]" * 100_000
QUICK = (
    *("--max-steps", 1, "--use-cpu", "--bf16", "false", "--max-length", 48, "--per-device-train-batch-size", 2),
    *("--tau-prompts", 0, "--report-to", "none", "--disable-tqdm", "--save-strategy", "no"),
)


def generate(*more, target="family/target"):
    return ("generate", "--target", target, "--max-new-tokens", 2, *more)


def evaluate(*more, prompts="prompts.txt", target="family/target"):
    common = ("--target", target, "--prompts", prompts, "--max-new-tokens", 4, "--repeats", 1)
    return ("eval", *common, "--drafter", "family/dflash", *more)


def regenerate(*more, data="chat.jsonl", target="family/target", output="answers.jsonl"):
    return ("regenerate", data, "--output", output, "--target", target, "--max-tokens", 2, *more)


def train(*more, data="text.jsonl", target="family/target", command="train"):
    shape = ("--kind", "dflash", "--num-layers", 1, "--block-size", 4, "--target-layer-ids", 0, 2)
    anew = ("--overwrite-output",) if command == "train" else ()
    return (command, *shape, "--target", target, "--dataset", data, "--output", "trained", *anew, *QUICK, *more)


def ngram(*more):
    return ("ngram", "build", "built", "--tokenizer", "family/target", *more)


def written(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name
