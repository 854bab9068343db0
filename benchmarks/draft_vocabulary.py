"""What a draft costs, and what it is worth, if only some of the target's tokens are proposed.

    python benchmarks/draft_vocabulary.py --target PATH/SmolLM2 --fresh dflash pard --sizes 4096 8192 16384 32768
    python benchmarks/draft_vocabulary.py --target PATH/stories260K --drafter DFlash PARD --prompt-text B.txt --sizes 64 128 256
    python benchmarks/draft_vocabulary.py --target SMOLLM2 --drafter DFlash PARD --data DATA --name draft_vocabulary_smollm2 \
        --dialogues benchmarks/data/smollm2-135m-instruct/*.jsonl.gz --sizes 2048 4096 8192 16384 32768

Drafters are folders (`--drafter`), or made on the spot at a real shape (`--fresh`): these know nothing, so that only their time
is told. For a vocabulary of each size, and for all tokens, all in one run and taking turns:

- the seconds of a draft (its fastest repeat), with packed weights, as calls have them: of `--block` tokens after a few new ones,
  and of finding the chain and a tree of 60 nodes in its logits;
- the bytes that a draft reads (the weights of the drafter's layers and the rows of the head), and what part of the time these
  would take at the speed at which this machine reads memory (the sum of a large tensor): the limit is 1;
- of drafters that know something, tau of greedy chains, and the share of the text that the vocabulary has. The tokens are those
  that the target itself writes most often: after some beginnings of texts, and tau is measured after others; or in dialogues that
  it wrote, and tau is measured on the papers' benchmarks, two questions of each.

The texts are compared with plain `generate`'s. Figures go to benchmarks/results/NAME.json (`--name`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_pardraft import AutoDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.evaluation.prompt_sources import read_rows
from hf_pardraft.generation.packing.packed_layers import packed_layers
from hf_pardraft.generation.tree.token_tree import build_tree, draft_chain
from hf_pardraft.models.base import ParallelDrafter
from hf_pardraft.models.inputs import DraftInputs
from memory_limit import memory_to_read, seconds_of
from result_files import RESULTS, public_command, save, this_machine
from smollm2_cases import BENCHMARKS, Models, prompts_of
from stories260k import story_beginnings

CONTEXT, NEW, PROMPT_TOKENS, TREE_NODES = 128, 4, 24, 60
# Drafts of a turn that are not timed.
WARM = 4
# Of fresh drafters; a DFlash drafter for SmolLM2 then has 35 MB beside its head.
LAYERS = {"dflash": 2, "pard": 2}
QUESTIONS = 2


def fresh(kind: str, target: PreTrainedModel, block: int) -> ParallelDrafter:
    """An untrained drafter of the target's width."""
    layers = LAYERS[kind]
    if kind == "dflash":
        ids = [2, target.config.num_hidden_layers // 2, target.config.num_hidden_layers - 3]
        return DFlashDrafter.for_target(target, num_layers=layers, target_layer_ids=ids, block_size=block + 1)
    # Without a name, so that no tokenizer says which token is in use.
    fields = {**target.config.to_dict(), "_name_or_path": "", "num_hidden_layers": layers, "layer_types": None}
    config = LlamaConfig.from_dict(fields)
    base = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    # Any token serves as a mask that nothing was learned of.
    return PardDrafter.from_causal_lm(base, mask_token_id=target.config.vocab_size - 1)


def bytes_per_second(repeats: int = 5) -> float:
    """How fast one reads memory here."""
    values = memory_to_read()
    return values.nbytes / min(seconds_of(values.sum) for _ in range(repeats))


def weight_bytes(drafter: ParallelDrafter, head: nn.Module) -> dict[str, int]:
    """What a draft reads of weights; embeddings are looked up."""
    tables = {drafter.get_input_embeddings(), drafter.get_output_embeddings()} - {None}
    of_tables = {id(weight) for table in tables for weight in table.parameters()}
    layers = sum(weight.nbytes for weight in drafter.parameters() if id(weight) not in of_tables)
    return {"layers": layers, "head": head.weight.nbytes}


class Draft:
    """A drafter with a vocabulary, ready to draft after a context of random tokens and states."""

    def __init__(self, drafter: ParallelDrafter, target: PreTrainedModel, ids: torch.LongTensor | None, block: int):
        self.drafter, self.depth, self.ids = drafter, block, ids
        self.take_turn()
        self.token_ids, self.state = drafter.draft_token_ids, drafter.new_draft_state(target)
        self.taps = drafter.taps_for(target)
        self.width, self.length = target.config.hidden_size, 0
        self.head = self.state.lm_head or drafter.get_output_embeddings() or target.get_output_embeddings()
        self.bytes = weight_bytes(drafter, self.head)
        self.logits = self.draft(CONTEXT)

    def take_turn(self) -> None:
        self.drafter.set_draft_vocabulary(self.ids)

    def draft(self, count: int = NEW) -> torch.Tensor:
        """Marginal logits after `count` tokens more."""
        ids = torch.randint(self.drafter.config.vocab_size, (1, count))
        positions = torch.arange(self.length, self.length + count)[None]
        features = torch.randn(1, count, len(self.taps) * self.width) if self.taps else None
        context = DraftInputs(ids, positions + bool(self.taps), features, positions if self.taps else None)
        self.length += count
        return self.drafter.draft(context, self.state, self.depth)

    def chain(self) -> None:
        draft_chain(self.logits, self.token_ids)

    def tree(self) -> None:
        build_tree(self.logits.float(), TREE_NODES, token_ids=self.token_ids)


@torch.no_grad()
def times_of(drafter, target, vocabularies: dict[str, torch.LongTensor | None], block: int, repeats: int) -> dict:
    """Seconds of a draft, a chain and a tree, by vocabulary; they take turns."""
    drafts = {name: Draft(drafter, target, ids, block) for name, ids in vocabularies.items()}
    found = {name: {"draft": [], "chain": [], "tree": []} for name in drafts}
    for _ in range(repeats):
        for name, draft in drafts.items():
            draft.take_turn()
            with packed_layers(drafter, draft.head, wanted=True):
                # Until it is known which layers are faster so.
                for _ in range(WARM):
                    draft.draft()
                for part in found[name]:
                    found[name][part].append(seconds_of(getattr(draft, part)))
    return {
        name: {**{part: min(times) for part, times in parts.items()}, "bytes": drafts[name].bytes}
        for name, parts in found.items()
    }


def beginnings(path: Path, tokenizer, count: int) -> torch.LongTensor:
    return story_beginnings(path, tokenizer, count, PROMPT_TOKENS)


@torch.no_grad()
def counts_of(target: PreTrainedModel, prompts: torch.LongTensor, new_tokens: int) -> torch.LongTensor:
    """How often the target writes each token after these prompts, `(vocab,)`."""
    text = target.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=new_tokens)
    return torch.bincount(text[:, prompts.shape[1] :].flatten(), minlength=target.config.vocab_size)


def counts_of_answers(files: list[Path], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> torch.LongTensor:
    """How often each token stands in the answers of dialogues, `(vocab,)`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for message in (message for file in files for row in read_rows(file) for message in row["messages"]):
        if message["role"] == "assistant":
            ids = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            counts += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)
    return counts


def worth_of(
    target, drafter, prompts: Sequence[torch.LongTensor], new_tokens: int, texts: list[torch.Tensor]
) -> dict[str, float]:
    """Tau of greedy chains, and the share of the text that can be proposed."""
    drafter.generation_config.draft_schedule = "fixed"
    drafter.generation_config.tree_budget = 0
    tokens = rounds = known = 0
    for prompt, text in zip(prompts, texts, strict=True):
        out = target.generate(prompt[None], assistant_model=drafter, do_sample=False, max_new_tokens=new_tokens)
        if not torch.equal(out[0], text):
            raise RuntimeError("a draft vocabulary changed the text")
        new = out[0, len(prompt) :]
        ids = drafter.draft_token_ids
        known += len(new) if ids is None else int(torch.isin(new, ids).sum())
        tokens, rounds = tokens + len(new), rounds + drafter.last_stats.rounds
    return {"tau": tokens / rounds, "text_known": known / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", nargs="*", default=[], help="folders of trained drafters")
    parser.add_argument("--fresh", nargs="*", default=[], choices=list(LAYERS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument(
        "--prompt-text", type=Path, help="beginnings: the first half counts tokens, the second measures tau"
    )
    parser.add_argument(
        "--dialogues", nargs="+", type=Path, help="JSON lines of the target's answers, whose tokens are counted instead"
    )
    parser.add_argument("--data", type=Path, help="folder of the benchmarks' files; by default they come from the Hub")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--name", default="draft_vocabulary")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.dtype).eval()
    vocab_size, worth = target.config.vocab_size, bool(arguments.drafter)
    # Which tokens they are makes no difference to the time.
    order, held_out, texts = torch.randperm(vocab_size), None, []
    if worth:
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        if arguments.dialogues:
            counts = counts_of_answers(arguments.dialogues, tokenizer, vocab_size)
            about = argparse.Namespace(data=arguments.data, limit=QUESTIONS, max_new_tokens=arguments.new_tokens)
            models = Models(target, tokenizer, {}, {})
            held_out = [prompt[0] for name in BENCHMARKS for prompt in prompts_of(name, models, about)]
        else:
            counted, held_out = beginnings(arguments.prompt_text, tokenizer, arguments.prompts).chunk(2)
            counts = counts_of(target, counted, arguments.new_tokens)
        order = counts.argsort(descending=True, stable=True)
        options = {"do_sample": False, "max_new_tokens": arguments.new_tokens}
        texts = [target.generate(prompt[None], **options)[0] for prompt in held_out]
    vocabularies = {str(size): order[:size] for size in arguments.sizes if size < vocab_size} | {"all": None}
    speed, rows = bytes_per_second(), []
    facts = {
        "machine": this_machine(),
        "dtype": arguments.dtype,
        "vocab_size": vocab_size,
        "block": arguments.block,
        "bytes_per_second": speed,
        "command": public_command(),
    }
    drafters = [(Path(name).name, AutoDrafter.from_pretrained(name, dtype=target.dtype)) for name in arguments.drafter]
    drafters += [(f"fresh {kind}", fresh(kind, target, arguments.block)) for kind in arguments.fresh]
    for name, drafter in drafters:
        drafter.eval()
        block = min(arguments.block, drafter.max_draft_depth or arguments.block)
        times = times_of(drafter, target, vocabularies, block, arguments.repeats)
        for size, ids in vocabularies.items():
            row = {"drafter": name, "tokens": size, **times[size]}
            row["times_all"] = times["all"]["draft"] / row["draft"]
            row["of_limit"] = sum(row["bytes"].values()) / speed / row["draft"]
            if drafter in [trained for _, trained in drafters[: len(arguments.drafter)]]:
                drafter.set_draft_vocabulary(ids)
                row |= worth_of(target, drafter, held_out, arguments.new_tokens, texts)
            rows.append(row)
            print(table_line(row), flush=True)
            save(RESULTS / f"{arguments.name}.json", {**facts, "rows": rows})


def table_line(row: dict) -> str:
    parts = [row["drafter"], row["tokens"], *(f"{1000 * row[part]:.2f} ms" for part in ("draft", "chain", "tree"))]
    parts += [f"{row['times_all']:.2f}x", f"{row['of_limit']:.2f}"]
    parts += [f"{row['tau']:.2f}", f"{row['text_known']:.1%}"] if "tau" in row else []
    return f"| {' | '.join(map(str, parts))} |"


if __name__ == "__main__":
    main()
