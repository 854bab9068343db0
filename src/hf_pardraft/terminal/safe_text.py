"""Text of a model for a terminal: what would steer the terminal is shown as a sign of its own.

An escape sequence can clear a screen, set a title, or make a terminal type. What a model writes is its training data's, and a
prompt's, so none of it may reach a terminal as it is.
"""

from transformers import TextStreamer

# Line ends and tabs are text. Unicode has a picture for each of the other controls of ASCII, and none for those after it.
PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
LATER_CONTROLS = {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
HALF_CHARACTERS = dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")
SHOWN_AS = {**PICTURES, 0x7F: "\N{SYMBOL FOR DELETE}", **LATER_CONTROLS, **HALF_CHARACTERS}


def harmless(text: str) -> str:
    """The text with signs in place of control characters (line ends and tabs excepted), and of halves of characters."""
    return text.translate(SHOWN_AS)


class HarmlessStreamer(TextStreamer):
    """transformers' streamer, for a terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(harmless(text), stream_end)
