"""What a row of a user's data says to a chat template."""

from typing import Any

from .files import parse_json

# What is said to `apply_chat_template` by whoever renders, and to no template.
RENDERERS_OWN = {
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "messages",
    "return_dict",
    "tokenize",
    "tools",
}


def template_inputs(row: dict[str, Any], template_kwargs: dict[str, Any]) -> tuple[list | None, dict[str, Any]]:
    """What a chat template gets besides messages: a row's `tools` (perhaps as JSON), and `template_kwargs` with the row's own
    on top.

    Raises:
        ValueError: if these are no mapping, or for the renderer and not for the template.
    """
    tools = row.get("tools")
    tools = without_nones(parse_json(tools, "the column tools") if isinstance(tools, str) and tools else tools)
    own = without_nones(row.get("chat_template_kwargs") or {})
    if not isinstance(own, dict):
        raise ValueError(
            f"expected a mapping in column 'chat_template_kwargs', got {type(own).__name__}: {str(own)[:100]}"
        )
    if taken := sorted(RENDERERS_OWN & (template_kwargs | own).keys()):
        raise ValueError(
            f"chat_template_kwargs are for the chat template (enable_thinking, say), got {', '.join(taken)}: leave out what says "
            "what to render, and how; tools have a column of their own"
        )
    return tools or None, template_kwargs | own


def are_messages(value: Any) -> bool:
    """Whether it is a conversation: a list of dicts with a `role`, not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def without_nones(value: Any) -> Any:
    """A value without the `None`s that Arrow puts where other rows have a key and this one has not."""
    if isinstance(value, dict):
        return {key: without_nones(part) for key, part in value.items() if part is not None}
    return [without_nones(part) for part in value] if isinstance(value, list) else value
