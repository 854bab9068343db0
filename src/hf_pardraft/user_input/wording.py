"""Words that users read: in what is told while work goes on, in summaries and on cards."""


def counted(number: int, noun: str) -> str:
    """How many of them there are: "1 prompt", "2 prompts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
