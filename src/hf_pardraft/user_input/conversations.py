"""What a row of a user's data says to a chat template."""

from typing import Any

from .files import parse_json


def template_inputs(row: dict[str, Any], template_kwargs: dict[str, Any]) -> tuple[list | None, dict[str, Any]]:
    """What a chat template gets besides messages: a row's `tools` (perhaps as JSON), and `template_kwargs` with the row's own
    on top."""
    tools = row.get("tools")
    tools = without_nones(parse_json(tools, "the column tools") if isinstance(tools, str) and tools else tools)
    own = without_nones(row.get("chat_template_kwargs") or {})
    if not isinstance(own, dict):
        raise ValueError(
            f"expected a mapping in column 'chat_template_kwargs', got {type(own).__name__}: {str(own)[:100]}"
        )
    return tools or None, template_kwargs | own


def without_nones(value: Any) -> Any:
    """A value without the `None`s that Arrow puts where other rows have a key and this one has not."""
    if isinstance(value, dict):
        return {key: without_nones(part) for key, part in value.items() if part is not None}
    return [without_nones(part) for part in value] if isinstance(value, list) else value
