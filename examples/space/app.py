"""A page that writes the same text twice, with a drafter and plainly, and shows how: python app.py --target T --drafter D."""

import argparse
import os

import gradio as gr
import pandas
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_pardraft
from hf_pardraft.demo.family import SHIPPED_FAMILY
from hf_pardraft.user_input.models import context_length
from watching import Written, watch

WAYS = {"with a drafter": "#2ea043", "plain": "#8b949e"}
EXAMPLES = {
    True: ["What is a prime number? Explain it to a child.", "Write a Python function that reverses a list."],
    False: [
        'def merge(first, second):\n    """Merge two sorted lists."""\n',
        "class Queue:\n    def put(self, item):\n",
    ],
}
EXACT = (torch.float32, torch.float64)
NEAR_TIES = "In {} a near tie may fall either way: the texts then part, and are equally likely."

WARM_UP = 48


def read_options() -> argparse.Namespace:
    """A Space says by variables what a command line says by options; without either it is the demo's family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=os.environ.get("TARGET", str(SHIPPED_FAMILY / "target")))
    parser.add_argument("--drafter", default=os.environ.get("DRAFTER", str(SHIPPED_FAMILY / "dflash")))
    parser.add_argument("--dtype", default=os.environ.get("DTYPE", "float32"))
    parser.add_argument("--port", type=int)
    return parser.parse_args()


class SideBySide:
    """The models, and what the page asks of them."""

    def __init__(self, target: str, drafter: str, dtype: str) -> None:
        loading = {"dtype": dtype, "device_map": "auto"}
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.target = AutoModelForCausalLM.from_pretrained(target, **loading)
        self.drafter = hf_pardraft.AutoDrafter.from_pretrained(drafter, **loading)
        self.drafter.check_target(self.target)
        self.precision = "" if self.target.dtype in EXACT else NEAR_TIES.format(str(self.target.dtype).split(".")[1])
        # The first rounds of a process find out what a round takes here. They are not the user's.
        self.examples = EXAMPLES[bool(self.tokenizer.chat_template)]
        for _ in self.write(self.examples[0], WARM_UP, 0, 0, False, False):
            pass

    def encode(self, message: str) -> torch.LongTensor:
        """The message as token ids of `(1, length)`, as a chat if the target knows chats."""
        text = message
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": message}]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        is_bare = text is message
        encoded = self.tokenizer(text, add_special_tokens=is_bare, return_tensors="pt")
        return encoded.input_ids.to(self.target.device)

    def write(self, message: str, max_new_tokens: int, temperature: float, seed: int, marks: bool, always: bool):
        """The page's values while the text is written, with the drafter and then plainly: each has the machine to itself.

        With `always` each round drafts as much as the drafter can, and otherwise as much as pays.
        """
        if not message.strip():
            raise refusal("Write something first.")
        input_ids = self.encode(message)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        # A field that is left empty has no number.
        settings = {"max_new_tokens": self.room(input_ids, int(max_new_tokens)), "seed": seed or 0, **sampling}
        drafted, plain = Written(), Written()
        full = {"num_assistant_tokens": self.drafter.draft_depth} if always else {}
        try:
            for drafted in watch(self.target, self.tokenizer, input_ids, self.drafter, **settings, **full):
                yield page_values(drafted, plain, marks)
            for plain in watch(self.target, self.tokenizer, input_ids, **settings):
                yield page_values(drafted, plain, marks)
        except ValueError as error:
            raise refusal(str(error)) from error

    def room(self, input_ids: torch.LongTensor, most: int) -> int:
        """How many tokens to write after these, `most` at most: the target knows no positions after its context."""
        context, length = context_length(self.target.config), input_ids.shape[1]
        room = most if context is None else min(most, context - length)
        if room < 1:
            raise refusal(f"The prompt has {length} tokens, and the target's context is {context}: shorten it.")
        return room


def refusal(why: str) -> gr.Error:
    """What the page tells its user, and nobody else: it is no failure of the program."""
    return gr.Error(why, print_exception=False)


def page_values(drafted: Written, plain: Written, marks: bool) -> list:
    """Texts, what is told of each, and the plot."""
    points = [pandas.DataFrame(text.points(way)) for way, text in zip(WAYS, (drafted, plain), strict=True)]
    texts = [drafted.html(marks), drafted.told(), plain.html(False), plain.told()]
    return [*texts, pandas.concat(points, ignore_index=True)]


def build(models: SideBySide) -> gr.Blocks:
    """The page."""
    with gr.Blocks(title="Plain and drafted") as page:
        gr.Markdown(
            "# The same text, sooner\nEach coloured stretch is what one draft and one forward of the target added. "
            + models.precision
        )
        message = gr.Textbox(label="Prompt", lines=3, value=models.examples[0])
        with gr.Row(equal_height=True):
            length = gr.Slider(8, 512, value=128, step=8, label="Tokens", info="at most")
            temperature = gr.Slider(0, 1.5, value=0, step=0.1, label="Temperature", info="0: greedy")
            seed = gr.Number(0, label="Seed", info="of what is drawn", precision=0, minimum=0, maximum=2**32)
            marks = gr.Checkbox(True, label="Colour accepted runs")
            always = gr.Checkbox(False, label="Draft in every round", info="otherwise where it pays")
        with gr.Row():
            start, stop = gr.Button("Write", variant="primary"), gr.Button("Stop")
        texts = []
        with gr.Row():
            for way in WAYS:
                with gr.Column():
                    gr.Markdown(f"### {way.capitalize()}")
                    texts += [gr.HTML(container=True), gr.Markdown()]
        axes = {"x": "seconds", "y": "tokens", "color": "way", "y_title": " ", "color_title": " "}
        plot = gr.LinePlot(**axes, color_map=WAYS, title="Tokens over time", height=280)
        gr.Examples(models.examples, message)
        inputs = [message, length, temperature, seed, marks, always]
        running = gr.on(
            [start.click, message.submit],
            models.write,
            inputs,
            [*texts, plot],
            show_progress="minimal",
            show_progress_on=plot,
        )
        stop.click(None, cancels=[running])
    return page


if __name__ == "__main__":
    options = read_options()
    # One text at a time: two would share the machine, and tell of nothing.
    app = build(SideBySide(options.target, options.drafter, options.dtype)).queue(default_concurrency_limit=1)
    app.launch(server_port=options.port)
