"""Answers from a server that speaks OpenAI's chat protocol (vLLM, SGLang, an inference provider), many at once."""

import base64
import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import InferenceClient

# The base of everything that can go wrong with a request, whichever HTTP library huggingface_hub uses.
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from ..user_input.conversations import template_inputs, without_nones
from ..user_input.files import parse_json
from ..user_input.redaction import redacted
from .rewriting import Answer, PassingError, Rewrite, check_sampling

# Too early, too many, or the server's own trouble: another try may succeed.
PASSING_STATUS = {408, 409, 425, 429}
# With these no row will succeed.
FINAL_STATUS = {401, 403, 404}
# A shorter key may well be a word of an answer.
LONG_SECRET = 16
# Servers that ask for no key take any.
NO_KEY = "EMPTY"


class ServerWriter:
    """Writes answers through `huggingface_hub.InferenceClient`.

    Each request carries a seed that depends on the row's index and the turn; whether the same seed gives the same text is
    the server's affair.

    Args:
        url: of the server, such as `http://localhost:8000/v1`.
        model: its name there.
        api_key: for servers that ask for one. A saved Hugging Face token is never sent.
        temperature, top_p, max_tokens, seed: see [`LocalWriter`].
        concurrency: requests at once.
        retries: how often a request is tried again.
        backoff: seconds before the first new try; each further wait is twice as long, at most a minute.
        timeout: seconds that a request may take.
        template_kwargs: sent as `chat_template_kwargs`, which vLLM and SGLang read.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None = None,
        temperature: float = 0.6,
        top_p: float = 1.0,
        max_tokens: int = 2048,
        seed: int = 0,
        concurrency: int = 16,
        retries: int = 5,
        backoff: float = 1.0,
        timeout: float = 600.0,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if concurrency < 1 or retries < 0:
            raise ValueError(f"concurrency must be at least 1 and retries at least 0, got {concurrency} and {retries}")
        check_sampling(temperature, top_p, max_tokens)
        check_url(url)
        self.client = InferenceClient(base_url=url, api_key=api_key or NO_KEY, timeout=timeout)
        # In no message, whatever the server says back.
        self._secrets = [api_key, *secrets_of_url(url)]
        self.url, self.model, self.seed = self.told(url), model, seed
        self.temperature, self.top_p, self.max_tokens = temperature, top_p, max_tokens
        self.template_kwargs = template_kwargs or {}
        self.concurrency, self.retries, self.backoff = concurrency, retries, backoff

    def write(self, rewrites: Iterable[Rewrite]) -> Iterator[Rewrite | tuple[Rewrite, Exception]]:
        """Rows as they get done, or with what kept them from it.

        Raises:
            OSError: if the server refuses the key or doesn't know the model, or if it answers nobody.
        """
        rewrites, running = iter(rewrites), {}
        stopped = threading.Event()
        num_failed_in_a_row = 0
        try:
            while True:
                for rewrite in islice(rewrites, self.concurrency - len(running)):
                    running[self._begin(rewrite, stopped)] = rewrite
                if not running:
                    return
                # Not without a timeout: an interrupt that comes right before Python's wait begins doesn't end it.
                for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                    outcome = self._outcome(future, running.pop(future))
                    num_failed_in_a_row = num_failed_in_a_row + 1 if isinstance(outcome, tuple) else 0
                    yield outcome
                    if num_failed_in_a_row > 2 * self.concurrency and isinstance(outcome, tuple):
                        raise OSError(
                            f"{num_failed_in_a_row} rows failed one after another, the last with: {outcome[1]}. Is the server "
                            f"at {self.url} up? What was written stays; run again to go on"
                        )
        finally:
            stopped.set()

    def _begin(self, rewrite: Rewrite, stopped: threading.Event) -> Future:
        """Write a row's answers in a thread of its own.

        Nobody waits for it when the run ends early, as on Ctrl-C: an executor would, until the server answers or the time is
        out, and Python itself for every thread that is no daemon.
        """
        future: Future = Future()

        def work() -> None:
            try:
                future.set_result(self.finish(rewrite, stopped))
            except BaseException as error:  # noqa: BLE001 (the waiting thread raises it)
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def told(self, text: object) -> str:
        """What may be said of an error: without the key, which some servers repeat, or a password in the URL."""
        return redacted(str(text), self._secrets)

    def _outcome(self, future: Future, rewrite: Rewrite) -> Rewrite | tuple[Rewrite, Exception]:
        try:
            return future.result()
        except HfHubHTTPError as error:
            if error.response.status_code in FINAL_STATUS:
                # Not "from error": a traceback would tell what that says.
                raise OSError(
                    f"the server at {self.url} refuses all requests for {self.model!r}: {self.told(error)}"
                ) from None
            return rewrite, (PassingError if may_pass(error) else OSError)(self.told(error))
        except OfflineModeIsEnabled as error:
            raise OSError(f"requests are switched off by HF_HUB_OFFLINE: unset it to reach {self.url}") from error
        except (HTTPError, OSError, PassingError) as error:
            return rewrite, PassingError(self.told(error))
        # Deeply nested JSON is a RecursionError to whoever meets it first.
        except (RecursionError, ValueError) as error:
            return rewrite, ValueError(self.told(error))

    def finish(self, rewrite: Rewrite, stopped: threading.Event) -> Rewrite:
        """All answers of a row, one after another."""
        while not rewrite.is_done:
            answer = self.answer(rewrite, stopped)
            if any(secret and len(secret) >= LONG_SECRET and secret in str(answer) for secret in self._secrets):
                raise PassingError("the server repeats the key in its answer, which is not stored")
            rewrite.add(answer)
        return rewrite

    def answer(self, rewrite: Rewrite, stopped: threading.Event | None = None) -> Answer:
        """The next answer of a row, tried again where that may help, unless the run has `stopped`.

        Raises:
            ValueError: for a prompt that is no conversation.
            HTTPError: if the last try failed, too.
        """
        if rewrite.prompt_text is not None:
            raise ValueError("its prompt is a text, and a server answers messages: use messages, or a local target")
        stopped = stopped or threading.Event()
        for attempt in range(self.retries + 1):
            try:
                return self._ask(rewrite)
            except OfflineModeIsEnabled:
                raise
            except (HTTPError, OSError) as error:
                if attempt == self.retries or not may_pass(error) or stopped.wait(self.pause(attempt, error)):
                    raise
        raise AssertionError("unreachable")

    def pause(self, attempt: int, error: Exception) -> float:
        """Seconds until the next try: what the server asks for, or twice as many as before, a little shuffled."""
        response = error.response if isinstance(error, HfHubHTTPError) else None
        asked = response.headers.get("Retry-After", "") if response is not None else ""
        wanted = float(asked) if asked.isdigit() else self.backoff * 2**attempt
        return min(wanted, 60.0) * random.uniform(1.0, 1.25)

    def _ask(self, rewrite: Rewrite) -> Answer:
        tools, template_kwargs = template_inputs(rewrite.row, self.template_kwargs)
        try:
            answered = self.client.chat_completion(
                rewrite.messages,
                model=self.model,
                seed=rewrite.seed(self.seed),
                tools=tools,
                extra_body={"chat_template_kwargs": template_kwargs} if template_kwargs else None,
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=self.max_tokens,
            )
        except (HTTPError, OSError):
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            # What huggingface_hub meets where an answer has not the form that it unpacks.
            raise PassingError(
                f"the server's answer is no chat completion ({type(error).__name__}: {error})"
            ) from error
        try:
            return answer_in(answered)
        except ValueError as error:
            raise PassingError(str(error)) from error


def answer_in(answered: Any) -> Answer:
    """The answer in what a server sent, in which anything may stand.

    Raises:
        ValueError: if it is none, or was cut off by a filter.
    """
    choices = expected(vars(answered).get("choices") or [], list, "choices")
    if not choices:
        raise ValueError("the server answered without a choice")
    choice = fields_in(choices[0], "a choice")
    message = fields_in(choice.get("message") or {}, "a message")
    if choice.get("finish_reason") == "content_filter":
        raise ValueError("the server's filter cut off the answer")
    text = expected(message.get("content"), (str, type(None)), "content")
    # A server with a reasoning parser reports thinking apart.
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    reasoning = expected(reasoning, (str, type(None)), "reasoning")
    calls = expected(message.get("tool_calls") or [], list, "tool_calls")
    tool_calls = [for_templates(fields_in(call, "a tool call")) for call in calls]
    if text is None and not reasoning and not tool_calls:
        raise ValueError("the server answered without a text")
    return Answer(text or "", choice.get("finish_reason") != "length", reasoning, tool_calls or None)


def expected(found: Any, kind: type | tuple[type, ...], name: str) -> Any:
    """`found`, or a `ValueError` unless it is of the kind that the protocol has there."""
    if not isinstance(found, kind):
        shown = repr(found)
        raise ValueError(
            f"the server's answer has {name} of an unexpected kind ({type(found).__name__}: "
            f"{shown[:60]}{'...' if len(shown) > 60 else ''})"
        )
    return found


def fields_in(found: Any, name: str) -> dict[str, Any]:
    """The fields of an object that was sent, as a plain dict; a `ValueError` for anything else.

    huggingface_hub's own are dicts without what is in an object below them that it doesn't know, and attributes with it. One that
    the server calls `get` would be their method.
    """
    return {**expected(found, dict, name), **({} if type(found) is dict else vars(found))}


def check_url(url: str) -> None:
    """Raise a `ValueError` unless requests can be sent there."""
    try:
        parts = urlsplit(url)
        # Asking for a port that is none raises.
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or any(character.isspace() for character in url):
        raise ValueError(f"expected a server's address, such as http://localhost:8000/v1, got {url!r}")


def secrets_of_url(url: str) -> list[str]:
    """The password in a URL, and what is sent in its place."""
    user_and_password = urlsplit(url).netloc.rpartition("@")[0]
    user, _, password = (unquote(part) for part in user_and_password.partition(":"))
    return [password, base64.b64encode(f"{user}:{password}".encode()).decode()] if user_and_password else []


def for_templates(tool_call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as chat templates take it: servers write the arguments as JSON, templates write JSON of the arguments.

    Raises:
        ValueError: for arguments that are no JSON, as of a call that was cut off, and for a call that is none.
    """
    function = without_nones(fields_in(tool_call.get("function") or {}, "a function"))
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parse_json(function["arguments"] or "{}", "what the server calls a tool with")
    return without_nones({"id": tool_call.get("id"), "type": "function"}) | {"function": function}


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code in PASSING_STATUS or error.response.status_code >= 500
    # No answer at all: a connection that broke or timed out.
    return True
