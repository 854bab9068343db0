"""Secrets are not told: keys and tokens in anything that is printed or stored are replaced."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from urllib.parse import quote

HIDDEN = "[hidden]"
# Shorter texts are no keys, and stand in ordinary words.
SHORTEST = 4
# Tokens of Hugging Face and OpenAI, what an HTTP header carries, and the password in a URL.
SHAPES = (
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?i)(?<=\bbearer )[A-Za-z0-9._~+/=-]{4,}"),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),
)
SECRET_VARIABLE = re.compile(r"(TOKEN|API_?KEY|SECRET|PASSWORD)$", re.IGNORECASE)
SECRET_OPTIONS = ("--token", "--hub-token", "--hub_token")


def redacted(text: str, secrets: Iterable[str | None] = ()) -> str:
    """`text` without `secrets`, also as JSON and URLs spell them, nor anything that looks like a token."""
    forms = set()
    for secret in secrets:
        if secret and len(secret) >= SHORTEST:
            forms |= {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}
    # The longer one first: one may be a part of another.
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    for shape in SHAPES:
        text = shape.sub(HIDDEN, text)
    return text


def known_secrets(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The secrets that a command was given: after options that take one, and in variables that are called so."""
    pairs = [word.partition("=") for word in arguments]
    told = [value for name, _, value in pairs if name in SECRET_OPTIONS and value]
    told += [value for name, value in pairwise(arguments) if name in SECRET_OPTIONS]
    return told + [value for name, value in environment.items() if SECRET_VARIABLE.search(name)]
