"""A run of `pardraft make`: its stages one after another, each a command, and what a later run finds done."""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.atomic_files import write_whole
from ..checkpoints.atomic_folders import writing_folder
from ..datagen.rewriting import ROWS_MISSING
from ..pairing.cut_down import cut_down_copy
from ..training.run_folder import checkpoints_in
from ..user_input.files import read_json
from ..user_input.models import load_model, load_tokenizer
from ..user_input.wording import counted
from .commands import SMALL_HIDDEN_SIZE, Commands, RunFolder
from .plan import (
    PROBE_STEPS,
    TEXT_SHARE,
    EvaluationPlan,
    StepCosts,
    TrainingPlan,
    evaluation_plan,
    evaluation_seconds,
    next_count,
    training_plan,
    training_seconds,
)
from .runner import LapTimer, RunCommand, as_typed, run_command
from .settings import Machine, MakeSettings, check_inputs
from .state import FILE, MakeState, check_folder
from .summary import introduction, public_command, recipe_text, summary
from .text import Text

Tell = Callable[[str], None]
# Of the free room on the disk, what stored hidden states may take.
ROOM_SHARE = 0.5
# Of a few steps, by a clock that ticks rarely.
LEAST_SECONDS = 1e-3
NO_CHUNK = {"upto": 0, "rows": 0, "seconds": 0.0}


@dataclass
class Making:
    """A run: what it was asked for, what it remembers, and how it does and tells things.

    Attributes:
        commands: of its stages.
        state: its memory.
        run: a command.
        clock: in seconds.
        tell: a line to the user.
    """

    commands: Commands
    state: MakeState
    run: RunCommand
    clock: Callable[[], float]
    tell: Tell

    @property
    def folder(self) -> RunFolder:
        return self.commands.folder

    @property
    def total(self) -> float:
        """Seconds for everything."""
        return self.commands.settings.seconds

    def make(self) -> list[str]:
        """All stages that are not done; the lines of the summary."""
        self.tell(introduction(self.commands, self.state))
        stages = {
            "base": self.make_base,
            "first text": lambda: self.write_text(most_chunks=1),
            "first states": self.store_first_states,
            "probe": self.probe,
            "text": self.write_text,
            "states": self.store_states,
            "training": self.train,
            "evaluation": self.evaluate,
            "card": self.write_card,
        }
        leftovers = {
            "probe": (self.folder.probe, self.folder.probe_states),
            "states": (self.folder.probe,),
            "training": (self.folder.states,),
        }
        for name, stage in stages.items():
            if name not in self.state.done:
                stage()
                self.state.finish(name)
            # Not before it is written down that nobody needs them any more, and again if a run was killed in between.
            for folder in leftovers.get(name, ()):
                shutil.rmtree(folder, ignore_errors=True)
        return summary(self.commands, self.state, read_json(self.folder.results))

    def make_base(self) -> None:
        """For a PARD drafter without a `base`: a copy of the target with fewer layers."""
        settings = self.commands.settings
        if settings.kind != "pard" or settings.base is not None:
            return
        watch = LapTimer(lambda seconds: self.state.spend("probe", seconds), self.clock)
        target = load_model(settings.target, settings.trust_remote_code, dtype=self.commands.dtype)
        copy, layers = cut_down_copy(target)
        beside = self.folder.base.with_name(".base")
        shutil.rmtree(beside, ignore_errors=True)
        copy.save_pretrained(beside)
        shutil.rmtree(self.folder.base, ignore_errors=True)
        beside.rename(self.folder.base)
        watch.lap()
        self.tell(
            f"{self.folder.base}: the target with {len(layers)} of its layers ({', '.join(map(str, layers))}), to begin with"
        )

    def write_text(self, most_chunks: float = math.inf) -> None:
        """Let the target write, a chunk after the other, until the time for that is used up."""
        text, state = Text(self.commands, self.state), self.state
        while state.is_writing or (len(state.chunks) < most_chunks and self._plan_chunk(text)):
            self._write_chunk(text)
        num_train, num_held_out = text.split()
        settings = self.commands.settings
        num_tokens = text.count_tokens(load_tokenizer(settings.target, settings.trust_remote_code))
        is_all = text.available is not None and state.chunks[-1]["upto"] >= text.available
        state.decided["text"] = {"train": num_train, "held_out": num_held_out, "tokens": num_tokens, "is_all": is_all}
        state.save()
        self.tell(f"{num_train} dialogues to learn from and {num_held_out} held out, {num_tokens} tokens")

    def _write_chunk(self, text: Text) -> None:
        """The last chunk, or what is missing of it."""
        chunks = self.state.chunks
        chunk, before = chunks[-1], chunks[-2] if len(chunks) > 1 else NO_CHUNK

        def spend(seconds: float) -> None:
            chunk["seconds"] += seconds

        number = len(chunks) - 1
        ended = self._run("text", text.command(number), spend)
        rows = len(text.rows())
        # Some prompts can't be answered, and the others can; and a target may have no more to ask.
        is_enough = 2 * rows >= chunk["upto"]
        if ended and not (ended == ROWS_MISSING and is_enough):
            if rows == before["rows"]:
                text.forget_prompts(number)
            from_the_start = self.commands.settings.dataset is None and not rows
            otherwise = "If the target can't write prompts, pass some with --dataset, and another --output. "
            raise failure("writing text", ended, otherwise if from_the_start else "")
        chunk["rows"] = rows
        self.state.save()

    def _plan_chunk(self, text: Text) -> bool:
        """Decide how much text is next; whether there is to be any."""
        chunks = self.state.chunks
        last, before = (*[NO_CHUNK] * 2, *chunks)[-1:-3:-1]
        speed = (last["rows"] - before["rows"]) / last["seconds"] if last["seconds"] > 0 else 0.0
        spent = self.state.seconds.get("text", 0.0)
        upto = next_count(last["rows"], last["upto"], spent, TEXT_SHARE * self.total, speed)
        if upto is not None and text.available is not None:
            upto = min(upto, text.available)
        if upto is None or upto <= last["upto"]:
            return False
        chunks.append({"upto": upto, "rows": None, "seconds": 0.0})
        self.state.save()
        return True

    def store_first_states(self) -> None:
        """The target's hidden states of the first text, which show what room those of all text will take."""
        if self.commands.may_store_states:
            folder = self.folder.probe_states
            self._cache_features("probe", folder)
            stored = sum(path.stat().st_size for path in folder.iterdir())
            self.state.decided["bytes_per_token"] = stored / max(1, self.state.decided["text"]["tokens"])

    def probe(self, stored_states: bool = True) -> None:
        """A few steps, which show what does not work while hours can be saved, and what a step costs."""
        folder = self.folder.probe
        shutil.rmtree(folder, ignore_errors=True)
        before = self.state.seconds.get("probe", 0.0)
        if ended := self._run("probe", self.commands.probe(stored_states)):
            raise failure("the first steps of training", ended)
        history = read_json(folder / "trainer_state.json")["log_history"]
        # The evaluation at the end is a part of it.
        training = next(entry["train_runtime"] for entry in reversed(history) if "train_runtime" in entry)
        evaluation = read_json(folder / "eval_results.json")["eval_runtime"]
        around = max(0.0, self.state.seconds["probe"] - before - training)
        step = max(LEAST_SECONDS, training - evaluation) / PROBE_STEPS
        self.state.decided["costs"] = {"step": step, "evaluation": evaluation, "around": around}
        self.tell(f"a step takes {step:.1f} s, an evaluation {evaluation:.0f} s")

    def store_states(self) -> None:
        """The target's hidden states of all text, if there is room."""
        decided = self.state.decided
        if not self.commands.may_store_states:
            return
        if "stored_states" not in decided:
            needed = decided["bytes_per_token"] * decided["text"]["tokens"]
            has_room = needed <= ROOM_SHARE * shutil.disk_usage(self.folder.path).free
            if not has_room:
                self.tell(f"no room for {needed / 1e9:.1f} GB of hidden states, so that every step runs the target")
                # What a step costs was tried with stored states.
                self.probe(stored_states=False)
            decided["stored_states"] = has_room
            self.state.save()
        if decided["stored_states"]:
            self._cache_features("states", self.folder.states)

    def _cache_features(self, stage: str, folder: Path) -> None:
        if ended := self._run(stage, self.commands.cache_features(folder)):
            raise failure("storing the target's hidden states", ended)

    def train(self) -> None:
        """As many steps as there is time for."""
        decided = self.state.decided
        if "training" not in decided:
            text = decided["text"]
            tokens = text["tokens"] * text["train"] // (text["train"] + text["held_out"])
            plan = training_plan(
                StepCosts(**decided["costs"]),
                training_seconds(self.total, self.state.spent),
                self.commands.num_examples(text["train"], tokens),
                self.commands.examples_per_step,
            )
            decided["training"] = vars(plan)
            self.state.save()
        plan = TrainingPlan(**decided["training"])
        self.tell(f"{counted(plan.steps, 'step')}, {plan.epochs:.1f} times over the text")
        resume = bool(checkpoints_in(self.folder.drafter))
        if ended := self._run("training", self.commands.train(plan, resume, decided.get("stored_states", False))):
            raise failure("training", ended)

    def evaluate(self) -> None:
        """Tau and speed on what was held out."""
        decided, state = self.state.decided, self.state
        if "evaluation" not in decided:
            speed = decided["text"]["tokens"] / state.seconds["text"]
            left = evaluation_seconds(self.total, state.spent)
            decided["evaluation"] = vars(evaluation_plan(left, speed, decided["text"]["held_out"]))
            state.save()
        has_plain_prompts = Text(self.commands, state).has_plain_prompts()
        words = self.commands.eval(EvaluationPlan(**decided["evaluation"]), has_plain_prompts)
        if ended := self._run("evaluation", words):
            raise failure("measuring", ended)
        # Results are published with the card, and local folders are nobody's business.
        results = read_json(self.folder.results) | {"command": public_command(self.commands, words)}
        write_whole(self.folder.results, json.dumps(results, indent=2) + "\n")

    def write_card(self) -> None:
        write_whole(self.folder.recipe, recipe_text(self.commands, self.state))
        if ended := self._run("card", self.commands.card()):
            raise failure("writing the card", ended)

    def _run(self, stage: str, words: list[str], spend: Callable[[float], None] = lambda seconds: None) -> int:
        """Run a command, and note what it takes as it goes on; its exit status."""

        def spent(seconds: float) -> None:
            spend(seconds)
            self.state.spend(stage, seconds)

        self.tell(f"\n$ {as_typed(words)}")
        watch = LapTimer(spent, self.clock)
        try:
            return self.run(words, watch.lap)
        finally:
            watch.lap()


def failure(what: str, status: int, otherwise: str = "") -> ValueError:
    return ValueError(
        f"{what} failed: the command above ended with status {status}, and says why. {otherwise}Mend that and run the same "
        "pardraft make again, which goes on there; what was done is kept"
    )


def make_drafter(
    settings: MakeSettings,
    output: str | Path,
    run: RunCommand = run_command,
    clock: Callable[[], float] = time.monotonic,
    tell: Tell = print,
    machine: Machine | None = None,
) -> list[str]:
    """Make a drafter; a run that was cut off goes on where it was.

    Args:
        settings: what is asked for.
        output: folder of the run.
        run: of a command's words; see [`run_command`].
        clock: in seconds, from any start on.
        tell: is given what goes on, line by line.
        machine: what computes; by default what is there.

    Returns:
        The lines of a summary.

    Raises:
        ImportError, OSError, ValueError: if something is missing or does not fit, or a stage failed.
    """
    folder, machine = Path(output), machine or Machine.this_one()
    state = check_folder(folder, settings)
    if state is None:
        config = check_inputs(settings).get_text_config(decoder=True)
        is_small = not machine.has_accelerator or config.hidden_size <= SMALL_HIDDEN_SIZE
        decided = {"is_small": is_small, "has_accelerator": machine.has_accelerator, "vocab_size": config.vocab_size}
        state = MakeState(folder / FILE, settings.as_json(), machine.dtype(settings), decided=decided)
    with writing_folder(folder):
        if not state.path.exists():
            state.save()
        run_folder = RunFolder(folder, settings.target_name, settings.kind_name)
        facts = {name: state.decided[name] for name in ("is_small", "has_accelerator", "vocab_size")}
        commands = Commands(settings, run_folder, dtype=state.dtype, **facts)
        return Making(commands, state, run, clock, tell).make()
