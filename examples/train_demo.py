"""Train the demo family: a tiny Qwen3 target for Python code, and a drafter of each kind for it.

    python examples/train_demo.py --output src/hf_pardraft/demo/family     # the real thing
    python examples/train_demo.py --output /tmp/family --quick             # every stage, at toy size

The corpus is the Python standard library's source, which every machine with Python has. The drafters
learn from text that the target itself wrote. A stage whose result already lies in `--work` is skipped,
so an interrupted run goes on where it stopped; `family.json` says how long each stage took.
"""

import argparse
import functools
import json
import platform
import shutil
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter, DraftTrainer, DraftTrainingArguments, PardDrafter
from hf_pardraft.checkpoints.saving import write_custom_generate
from hf_pardraft.models.configuration_dflash import default_target_layer_ids

END_OF_TEXT = "<|endoftext|>"
# Real tokenizers carry unused special tokens; a drafter takes one as its mask.
RESERVED = [f"<|reserved_{i}|>" for i in range(4)]
HELD_OUT_EVERY = 20
OFFSET_CHARACTERS = 41
BATCH = 8
# The target sees all of the library first, and then these modules until it knows them by heart: a model of three million
# weights is a poor judge of the whole library, and what it writes should be worth reading. The drafters learn mostly from how
# it completes them. A big family drafts well wherever its target writes well; a drafter of a million weights needs a
# smaller world.
FAMILIAR_MODULES = ("contextlib.py", "csv.py", "heapq.py", "json/encoder.py", "queue.py", "textwrap.py")


@dataclass
class Size:
    """How big a family to train: sequence lengths and counts are in tokens."""

    vocab_size: int = 2048
    target_hidden: int = 128
    target_intermediate: int = 256
    target_layers: int = 20
    target_sequence: int = 512
    target_steps: int = 1800
    familiar_sequence: int = 256
    familiar_offsets: int = 16
    familiar_steps: int = 900
    max_files: int | None = None
    text_rows: int = 2400
    text_batch: int = 300
    prompt_length: int = 64
    text_length: int = 256
    drafter_layers: int = 2
    drafter_intermediate: int = 1024
    block_size: int = 8
    num_anchors: int = 96
    drafter_steps: int = 2000


QUICK = Size(
    vocab_size=512,
    target_hidden=32,
    target_intermediate=64,
    target_layers=4,
    target_sequence=128,
    target_steps=8,
    familiar_sequence=64,
    familiar_offsets=2,
    familiar_steps=4,
    max_files=12,
    text_rows=32,
    text_batch=16,
    prompt_length=16,
    text_length=64,
    drafter_intermediate=128,
    num_anchors=8,
    drafter_steps=4,
)


@functools.cache
def standard_library_sources(max_files: int | None = None) -> tuple[list[str], list[str]]:
    """Sources of the standard library without its tests, as (training texts, held-out texts), in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "encodings"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    texts = [t for f in files if len(t := f.read_text(encoding="utf-8", errors="ignore")) > 500][:max_files]
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or texts[-1:]
    return [t for t in texts if t not in set(held_out)], held_out


def familiar_sources(num_offsets: int) -> list[str]:
    """Sources of the familiar modules, each begun at several places: rows of them then begin anywhere, as prompts do."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / name).read_text(encoding="utf-8") for name in FAMILIAR_MODULES]
    return [text[OFFSET_CHARACTERS * offset :] for offset in range(num_offsets) for text in texts]


def train_tokenizer(texts: list[str], size: Size) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size.vocab_size,
            special_tokens=[END_OF_TEXT, *RESERVED],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=RESERVED,
        clean_up_tokenization_spaces=False,
    )


def packed_rows(tokenizer, texts: list[str], length: int) -> Dataset:
    """All texts, each closed by the end-of-text token, cut into rows of `length` tokens."""
    ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})


def stage_tokenizer(out: Path, size: Size) -> dict:
    train_texts, _ = standard_library_sources(size.max_files)
    train_tokenizer(train_texts, size).save_pretrained(out)
    return {"files": len(train_texts), "characters": sum(map(len, train_texts))}


def fresh_target(size: Size, tokenizer) -> Qwen3ForCausalLM:
    """Deep rather than wide: the cost of a call then dominates, as it does for big models on a GPU."""
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.target_hidden,
        intermediate_size=size.target_intermediate,
        num_hidden_layers=size.target_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train_target(
    model, texts: list[str], held_out: list[str], tokenizer, checkpoints: Path, sequence: int, **settings
) -> dict:
    """Next-token training in place on rows of `sequence` tokens, resumable."""
    rows = packed_rows(tokenizer, texts, sequence)
    held_out_rows = packed_rows(tokenizer, held_out, sequence)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=checkpoints,
            per_device_train_batch_size=BATCH,
            weight_decay=0.05,
            use_cache=True,
            adam_beta2=0.98,
            lr_scheduler_type="cosine",
            bf16=True,
            logging_steps=50,
            save_steps=300,
            save_total_limit=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=rows,
        eval_dataset=held_out_rows.select(range(min(32, len(held_out_rows)))),
        data_collator=default_data_collator,
    )
    saved = sorted(checkpoints.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=str(saved[-1]) if saved else None)
    return {"tokens": len(rows) * sequence, "held_out_loss": trainer.evaluate()["eval_loss"]}


def save_target(model, tokenizer, out: Path) -> None:
    """In the precision that is shipped: the drafters learn from the rounded weights."""
    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def stage_library(out: Path, size: Size, work: Path, compile_model: bool) -> dict:
    """A target that has read the whole library."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    train_texts, held_out = standard_library_sources(size.max_files)
    model = fresh_target(size, tokenizer)
    result = train_target(
        model,
        train_texts,
        held_out,
        tokenizer,
        work / "library-checkpoints",
        size.target_sequence,
        max_steps=size.target_steps,
        learning_rate=3e-3,
        warmup_steps=min(100, size.target_steps // 5),
        torch_compile=compile_model,
    )
    save_target(model, tokenizer, out)
    return result


def stage_target(out: Path, size: Size, work: Path, compile_model: bool) -> dict:
    """The same target, until it knows a few modules well."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(work / "library", dtype=torch.float32)
    texts = familiar_sources(size.familiar_offsets)
    result = train_target(
        model,
        texts,
        texts,
        tokenizer,
        work / "target-checkpoints",
        size.familiar_sequence,
        max_steps=size.familiar_steps,
        learning_rate=2e-3,
        warmup_steps=size.familiar_steps // 20,
        torch_compile=compile_model,
    )
    save_target(model, tokenizer, out)
    return {"tokens": result["tokens"], "loss": result["held_out_loss"]}


def stage_text(out: Path, size: Size, work: Path) -> dict:
    """Let the target continue pieces of code greedily, as the demo does: three quarters of them from modules it knows."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    target = load_target(work)
    library, _ = standard_library_sources(size.max_files)
    prompts = []
    for texts, quarters in ((familiar_sources(size.familiar_offsets), 3), (library, 1)):
        pieces = packed_rows(tokenizer, texts, size.prompt_length).shuffle(seed=0)
        prompts += pieces[: size.text_rows * quarters // 4]["input_ids"]
    rows = []
    for batch in torch.tensor(prompts).split(size.text_batch):
        rows += target.generate(
            batch, attention_mask=torch.ones_like(batch), max_length=size.text_length, do_sample=False
        ).tolist()
        print(f"text: {len(rows)} of {len(prompts)} rows", flush=True)
    Dataset.from_list([labelled(row, size.prompt_length, tokenizer.eos_token_id) for row in rows]).save_to_disk(out)
    return {"rows": len(rows), "tokens": sum(map(len, rows))}


def labelled(row: list[int], prompt_length: int, eos_token_id: int) -> dict[str, list[int]]:
    """Input ids up to the end of text that the target wrote (padding goes), and labels on what it wrote."""
    end = row.index(eos_token_id, prompt_length) + 1 if eos_token_id in row[prompt_length:] else len(row)
    return {"input_ids": row[:end], "labels": [-100] * prompt_length + row[prompt_length:end]}


def train_drafter(drafter, target, out: Path, size: Size, work: Path, **settings) -> dict:
    """Train a drafter on the text that the target wrote; a sixtieth of it is held out."""
    text = load_from_disk(str(work / "text")).train_test_split(test_size=max(1, size.text_rows // 60), seed=0)
    checkpoints_folder = work / f"{out.name}-checkpoints"
    trainer = DraftTrainer(
        model=drafter,
        target=target,
        args=DraftTrainingArguments(
            output_dir=checkpoints_folder,
            max_steps=size.drafter_steps,
            per_device_train_batch_size=BATCH,
            weight_decay=0.01,
            adam_beta2=0.98,
            warmup_steps=size.drafter_steps // 20,
            lr_scheduler_type="cosine",
            num_anchors=size.num_anchors,
            draft_tokens=size.block_size,
            logging_steps=50,
            save_steps=200,
            save_total_limit=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            **{"loss_gamma": 4.0, "learning_rate": 3e-3, **settings},
        ),
        train_dataset=text["train"],
        eval_dataset=text["test"],
    )
    checkpoints = sorted(checkpoints_folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    scores = trainer.evaluate()
    # Code that the family does not know then costs next to nothing.
    # The package that the family is shipped in has the code, but for what brings the package in.
    trainer.model.to(torch.bfloat16).save_pretrained(out, with_code=False)
    write_custom_generate(out)
    return {"held_out_expected_tau": scores["eval_expected_tau"], "held_out_accuracy_1": scores["eval_accuracy_1"]}


def load_target(work: Path):
    return AutoModelForCausalLM.from_pretrained(work / "target", dtype=torch.float32).eval()


def stage_pard(out: Path, size: Size, work: Path) -> dict:
    """A shallow causal LM that starts from the target's embedding; COD teaches it to read and to draft at once."""
    target, tokenizer = load_target(work), AutoTokenizer.from_pretrained(work / "target")
    shallow = {
        "num_hidden_layers": size.drafter_layers,
        "intermediate_size": size.drafter_intermediate,
        "layer_types": None,
    }
    base = Qwen3ForCausalLM(Qwen3Config.from_dict({**target.config.to_dict(), **shallow}))
    base.get_input_embeddings().load_state_dict(target.get_input_embeddings().state_dict())
    base.model.norm.load_state_dict(target.model.norm.state_dict())
    drafter = PardDrafter.from_causal_lm(base, tokenizer=tokenizer)
    return train_drafter(drafter, target, out, size, work)


def stage_dflash(out: Path, size: Size, work: Path) -> dict:
    """A block-diffusion drafter on the target's hidden states; wide MLPs, since depth is what costs time."""
    target, tokenizer = load_target(work), AutoTokenizer.from_pretrained(work / "target")
    drafter = DFlashDrafter.for_target(
        target,
        num_layers=size.drafter_layers,
        block_size=size.block_size,
        tokenizer=tokenizer,
        intermediate_size=size.drafter_intermediate,
        target_layer_ids=default_target_layer_ids(size.target_layers, 4),
    )
    return train_drafter(drafter, target, out, size, work)


def stage_dflare(out: Path, size: Size, work: Path) -> dict:
    """DFlash with fusion weights and context projections of each layer's own."""
    target, tokenizer = load_target(work), AutoTokenizer.from_pretrained(work / "target")
    drafter = DFlareDrafter.for_target(
        target,
        num_layers=size.drafter_layers,
        block_size=size.block_size,
        tokenizer=tokenizer,
        intermediate_size=size.drafter_intermediate,
    )
    return train_drafter(drafter, target, out, size, work, loss_gamma=4.5, learning_rate=1e-2, bf16=True)


def stage_dart(out: Path, size: Size, work: Path) -> dict:
    """One layer that learns the target's distributions, not its choices."""
    target = load_target(work)
    drafter = DartDrafter.for_target(target, draft_length=size.block_size, intermediate_size=size.drafter_intermediate)
    return train_drafter(drafter, target, out, size, work, kl_gamma=0.8, bf16=True)


def publish(output: Path, work: Path, report: dict) -> None:
    """Copy the finished family, and how it was made, to its folder."""
    for name in ("target", "pard", "dflash", "dflare", "dart"):
        shutil.copytree(work / name, output / name, dirs_exist_ok=True)
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    report = {"command": "python examples/train_demo.py", "machine": machine, **report}
    (output / "family.json").write_text(json.dumps(report, indent=2) + "\n")


def run_stage(name: str, work: Path, report: dict, function, *arguments) -> None:
    """Run one stage into `work / name`, unless an earlier run finished it, and note how long it took."""
    if name in report:
        print(f"{name}: done before, in {report[name]['seconds']:.0f} s")
        return
    print(f"{name}: started", flush=True)
    started = time.perf_counter()
    result = function(work / name, *arguments)
    report[name] = {"seconds": round(time.perf_counter() - started, 1), **result}
    (work / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{name}: {report[name]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that the family is written to")
    parser.add_argument("--work", type=Path, help="folder for unfinished work (default: OUTPUT.work)")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that every stage runs, in a minute")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the target's training (needs a C++ compiler)"
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    work = arguments.work or arguments.output.with_name(arguments.output.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    report = json.loads((work / "report.json").read_text()) if (work / "report.json").exists() else {}
    set_seed(0)
    run_stage("tokenizer", work, report, stage_tokenizer, size)
    run_stage("library", work, report, stage_library, size, work, arguments.compile)
    run_stage("target", work, report, stage_target, size, work, arguments.compile)
    run_stage("text", work, report, stage_text, size, work)
    run_stage("pard", work, report, stage_pard, size, work)
    run_stage("dflash", work, report, stage_dflash, size, work)
    run_stage("dflare", work, report, stage_dflare, size, work)
    run_stage("dart", work, report, stage_dart, size, work)
    publish(arguments.output, work, report)
    print(f"{arguments.output}: {sum(report[name]['seconds'] for name in report):.0f} s in all")


if __name__ == "__main__":
    main()
