"""How the hours are shared out: how much text, how many steps, how long an evaluation. Pure: numbers in, numbers out."""

import math
from dataclasses import dataclass

# Shares of the hours. What a stage leaves, the next has.
TEXT_SHARE = 0.4
TRAINED_BY = 0.9
# However long the text took, training gets so much.
LEAST_TRAINING_SHARE = 0.3
LEAST_EVAL_SHARE = 0.05

# The first dialogues show how fast the target writes, and what a step costs.
FIRST_DIALOGUES = 8
# The speed of a few is a rough guess, so that many become so many times as many at most.
GROWTH = 8
# Below this share of what text may take, no more is begun.
NOT_WORTH_IT = 0.05

# One of so many dialogues is held out; so few at least, so many at most.
HELD_OUT_SHARE = 20
LEAST_HELD_OUT, MOST_HELD_OUT = 4, 32

PROBE_STEPS = 4
# Going over the same text more often than that teaches the drafter the text, and not the target.
MOST_EPOCHS = 20
EVALUATION_SHARE = 0.1
MOST_EVALUATIONS = 40

# Plain generate and the drafter, each timed twice, and the drafter watched.
PASSES = 5
# One text at a time is written so much slower than a batch, at least.
BATCH_GAIN = 4
SHORT_ANSWER, LONG_ANSWER = 64, 256


def next_count(count: int, wanted: int, spent: float, allowed: float, per_second: float) -> int | None:
    """How many dialogues the next command should have brought the text to.

    Args:
        count: there are; 0 before the first command.
        wanted: of the last command. Some may have failed.
        spent: seconds of all commands so far.
        allowed: seconds for text.
        per_second: dialogues, in the last command.

    Returns:
        More than `wanted`, or `None` if the time is used up.
    """
    if wanted == 0:
        return FIRST_DIALOGUES
    left = allowed - spent
    more = min(int(left * per_second), (GROWTH - 1) * count)
    if left < NOT_WORTH_IT * allowed or more < 1:
        return None
    return wanted + more


def held_out(count: int) -> list[int]:
    """Which of `count` dialogues are held out: every 20th, but 4 at least and 32 at most, and a half of very few."""
    step = max(2, min(HELD_OUT_SHARE, count // LEAST_HELD_OUT))
    return list(range(0, count, step))[:MOST_HELD_OUT]


@dataclass(frozen=True)
class StepCosts:
    """What a probe of training showed, in seconds: of a step, of an evaluation, and of what comes before and after them."""

    step: float
    evaluation: float
    around: float


@dataclass(frozen=True)
class TrainingPlan:
    """How long a training is.

    Attributes:
        steps: of the optimizer.
        eval_steps: after how many of them the drafter is evaluated and saved.
        epochs: how often each dialogue is seen.
        is_capped: whether there was time for more, and the text was too little.
    """

    steps: int
    eval_steps: int
    epochs: float
    is_capped: bool


def training_plan(costs: StepCosts, allowed: float, num_examples: int, batch_size: int) -> TrainingPlan:
    """As many steps as fit, with evaluations in between.

    Args:
        costs: of a step and an evaluation.
        allowed: seconds, loading included.
        num_examples: to learn from.
        batch_size: of them in a step.
    """
    allowed = max(0.0, allowed - costs.around - costs.evaluation)
    most = MOST_EVALUATIONS if costs.evaluation <= 0 else int(EVALUATION_SHARE * allowed / costs.evaluation)
    num_evaluations = max(1, min(MOST_EVALUATIONS, most))
    per_epoch = math.ceil(num_examples / batch_size)
    affordable = max(1, int((allowed - num_evaluations * costs.evaluation) / costs.step))
    steps = min(affordable, MOST_EPOCHS * per_epoch)
    eval_steps = math.ceil(steps / num_evaluations)
    return TrainingPlan(steps, eval_steps, steps / per_epoch, steps < affordable)


@dataclass(frozen=True)
class EvaluationPlan:
    """How many held-out prompts are continued, and by how many tokens each."""

    prompts: int
    new_tokens: int


def evaluation_plan(allowed: float, tokens_per_second: float, num_held_out: int) -> EvaluationPlan:
    """As many prompts as fit, rather than long answers.

    Args:
        allowed: seconds.
        tokens_per_second: of the target, in batches.
        num_held_out: prompts that there are.
    """
    tokens = allowed * tokens_per_second / BATCH_GAIN / PASSES
    per_prompt = int(min(LONG_ANSWER, max(SHORT_ANSWER, tokens / num_held_out)))
    return EvaluationPlan(max(1, min(num_held_out, int(tokens / per_prompt))), per_prompt)


def training_seconds(total: float, spent: float) -> float:
    """What training may take, of `total` seconds of which some are spent."""
    return max(TRAINED_BY * total - spent, LEAST_TRAINING_SHARE * total)


def evaluation_seconds(total: float, spent: float) -> float:
    """What the last evaluation may take, likewise."""
    return max(total - spent, LEAST_EVAL_SHARE * total)
