"""Draw the documentation's pictures: a round, the folders, and what was measured on stories260K.

    python docs/images/draw.py

Each is an SVG with a light and a dark palette, on a ground of its own, so that it can be read in both modes. The figures of the
plot are those of benchmarks/results/decode.json; tests/test_docs.py compares the committed files with what is drawn here.
"""

import json
from html import escape
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results" / "decode.json"
# Class of a shape: its colours in light and dark mode.
FILLS = {
    "ground": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#161b22"),
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "token": ("#ffffff", "#0d1117"),
    "draft": ("#ddf4ff", "#0c2d6b"),
    "target": ("#fbefff", "#3c1e70"),
    "kept": ("#dafbe1", "#033a16"),
    "bonus": ("#fff1e5", "#5a1e02"),
    "slow": ("#afb8c1", "#484f58"),
    "fast": ("#54aeff", "#1f6feb"),
    "drafter-word": ("#0969da", "#79c0ff"),
    "target-word": ("#8250df", "#d2a8ff"),
    "kept-word": ("#1a7f37", "#56d364"),
    "bonus-word": ("#bc4c00", "#ffa657"),
}
STROKES = {
    "edge": ("#d0d7de", "#3d444d"),
    "line": ("#59636e", "#9198a1"),
    "draft-line": ("#0969da", "#79c0ff"),
    "target-line": ("#8250df", "#d2a8ff"),
    "kept-line": ("#1a7f37", "#56d364"),
    "bonus-line": ("#bc4c00", "#ffa657"),
}


def style() -> str:
    """The palettes as CSS; a viewer that knows of no dark mode takes the light one."""

    def rules(mode: int) -> str:
        fills = "".join(f".{name}{{fill:{colours[mode]}}}" for name, colours in FILLS.items())
        return fills + "".join(f".{name}{{stroke:{colours[mode]}}}" for name, colours in STROKES.items())

    base = "text{font-family:-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}.none{fill:none}"
    return f"<style>{base}{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}</style>"


class Drawing:
    """Shapes, one after the other; x grows to the right and y downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.shapes: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, "ground edge", radius=10)

    def box(self, x: float, y: float, width: float, height: float, classes: str, radius: float = 6, more="") -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{classes}"{more}/>'
        )

    def text(self, x: float, y: float, words: str, classes="text", size: float = 15, anchor="middle", bold=False):
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" class="{classes}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def line(self, points: list[tuple[float, float]], classes="line", width=1.5, arrow=False, dashed=False) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 4"' if dashed else ""
        self.shapes.append(f'<path d="{path}" class="none {classes}" stroke-width="{width:g}"{dashes}/>')
        if arrow:
            self.arrowhead(points[-2], points[-1], classes)

    def arrowhead(self, before: tuple[float, float], end: tuple[float, float], classes: str, size=7.0) -> None:
        along = (end[0] - before[0], end[1] - before[1])
        length = (along[0] ** 2 + along[1] ** 2) ** 0.5
        u, v = along[0] / length * size, along[1] / length * size
        wings = [(end[0] - u - v * 0.6, end[1] - v + u * 0.6), (end[0] - u + v * 0.6, end[1] - v - u * 0.6)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (wings[0], end, wings[1]))
        self.shapes.append(f'<path d="{path}" class="none {classes}" stroke-width="1.8"/>')

    def chip(self, x: float, y: float, word: str, classes="token edge", words="text", width=62.0) -> None:
        """A token, its middle at (x, y)."""
        self.box(x - width / 2, y - 15, width, 30, classes)
        self.text(x, y + 5, word, words, 15)

    def svg(self) -> str:
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", style(), *self.shapes, "</svg>", ""])


# A round. The drafter's marginals for three places; the tree has the five most probable prefixes of these, and the target would
# write "mat", "and", "purred".
MARGINALS = (("mat", 0.62, "sofa", 0.30), ("and", 0.55, "by", 0.25), ("slept", 0.50, "ran", 0.20))
ROUND_ROWS = (115, 175, 235, 295)


def round_picture() -> Drawing:
    picture = Drawing(
        1000, 410, "A round: the drafter drafts, a tree is built, the target verifies it, and tokens are committed"
    )
    steps = (
        (20, "1", "Draft", "the drafter, one forward", "drafter-word"),
        (265, "2", "Tree", "the likeliest prefixes", "muted"),
        (510, "3", "Verify", "the target, one forward", "target-word"),
        (755, "4", "Commit", "what agrees, and one more", "kept-word"),
    )
    for x, number, name, by, classes in steps:
        picture.box(x, 20, 225, 325, "panel edge", radius=8)
        picture.text(x + 16, 50, f"{number}  {name}", "text", 19, "start", bold=True)
        picture.text(x + 16, 74, by, classes, 13.5, "start")
        if number != "4":
            picture.line([(x + 227, 205), (x + 242, 205)], width=2, arrow=True)
    draw_marginals(picture, 20)
    draw_tree(picture, 265, verified=False)
    draw_tree(picture, 510, verified=True)
    draw_commit(picture, 755)
    picture.line([(867, 345), (867, 377), (132, 377), (132, 348)], width=1.5, arrow=True)
    picture.box(345, 363, 310, 28, "ground", radius=4)
    picture.text(500, 382, '"purred" is the anchor of the next round', "muted", 14)
    return picture


def draw_marginals(picture: Drawing, x: float) -> None:
    picture.chip(x + 46, ROUND_ROWS[0], "the")
    picture.text(x + 88, ROUND_ROWS[0] + 5, "the anchor", "muted", 13, "start")
    for y, (first, odds, second, other) in zip(ROUND_ROWS[1:], MARGINALS, strict=True):
        picture.chip(x + 46, y, "mask", "draft draft-line", "drafter-word")
        for line, (word, share) in enumerate(((first, odds), (second, other))):
            top = y - 17 + 19 * line
            picture.text(x + 134, top + 12, word, "text", 13.5, "end")
            picture.box(x + 141, top + 2, 66 * share / 0.62, 11, "draft draft-line", radius=2)
    picture.line([(x + 46, ROUND_ROWS[0] + 15), (x + 46, ROUND_ROWS[1] - 15)], "draft-line")
    for above, below in pairwise(ROUND_ROWS[1:]):
        picture.line([(x + 46, above + 15), (x + 46, below - 15)], "draft-line")


def draw_tree(picture: Drawing, x: float, verified: bool) -> None:
    left, right, middle = x + 70, x + 160, x + 115
    places = {
        "the": (middle, ROUND_ROWS[0]),
        "mat": (left, ROUND_ROWS[1]),
        "sofa": (right, ROUND_ROWS[1]),
        "mat and": (left, ROUND_ROWS[2]),
        "sofa and": (right, ROUND_ROWS[2]),
        "mat and slept": (left, ROUND_ROWS[3]),
    }
    odds = {"mat": ".62", "sofa": ".30", "mat and": ".34", "sofa and": ".17", "mat and slept": ".17"}
    for name, (to_x, to_y) in places.items():
        if name == "the":
            continue
        from_x, from_y = places[name.rpartition(" ")[0] or "the"]
        is_kept = verified and name in ("mat", "mat and")
        picture.line(
            [(from_x, from_y + 15), (to_x, to_y - 15)], "kept-line" if is_kept else "line", 2.5 if is_kept else 1.5
        )
    for name, (at_x, at_y) in places.items():
        word = name.rpartition(" ")[2]
        if verified and name in ("mat", "mat and"):
            picture.chip(at_x, at_y, word, "kept kept-line", "kept-word")
            picture.text(at_x - 42, at_y + 6, "✓", "kept-word", 16)
        elif verified and name != "the":
            picture.chip(at_x, at_y, word, "token edge", "muted")
        else:
            picture.chip(at_x, at_y, word)
        if not verified and name in odds:
            picture.text(at_x + (48 if at_x == right else -48), at_y + 5, odds[name], "muted", 12.5)
    if verified:
        picture.text(left - 42, ROUND_ROWS[3] + 6, "✗", "muted", 15)
        picture.line([(left + 31, ROUND_ROWS[2] + 8), (right + 3, ROUND_ROWS[3] - 15)], "bonus-line", 2, dashed=True)
        picture.chip(right + 3, ROUND_ROWS[3], "purred", "bonus bonus-line", "bonus-word", 66)


def draw_commit(picture: Drawing, x: float) -> None:
    words = (
        ("the", "token edge", "text"),
        ("mat", "kept kept-line", "kept-word"),
        ("and", "kept kept-line", "kept-word"),
    )
    notes = ("", "accepted", "accepted", "the target's own")
    for y, (word, classes, colour), note in zip(
        ROUND_ROWS, (*words, ("purred", "bonus bonus-line", "bonus-word")), notes, strict=True
    ):
        picture.chip(x + 56, y, word, classes, colour, 66)
        picture.text(x + 100, y + 5, note, "muted", 13, "start")
    for above, below in pairwise(ROUND_ROWS):
        picture.line([(x + 56, above + 15), (x + 56, below - 15)], "line")
    picture.text(x + 100, ROUND_ROWS[0] + 5, "was there", "muted", 13, "start")
    picture.text(x + 112, 333, "3 tokens for 1 target forward", "text", 13.5)


# The folders, from the entry points down to what ships with a drafter: left end, row, width and purpose of each.
FOLDERS = {
    "demo": (25, 1, 465, "a tiny family, shown beside plain generate"),
    "terminal": (505, 1, 225, "texts as written, a chat"),
    "making": (745, 1, 230, "a drafter in one command"),
    "evaluation": (25, 2, 225, "measure, plot"),
    "hub": (265, 2, 225, "model cards, push"),
    "services": (505, 2, 225, "what models/ asks us for"),
    "datagen": (745, 2, 230, "the target writes texts"),
    "generation": (25, 3, 225, "rounds inside generate"),
    "training": (745, 3, 230, "layouts, losses, trainer"),
    "ngram": (25, 4, 225, "n-gram models for trees"),
    "by_name": (392, 4, 212, "names that transformers gets"),
    "serving": (632, 4, 212, "transformers serve, drafted"),
    "user_input": (45, 5.4, 440, "files, models and data that users name, checked"),
    "pairing": (515, 5.4, 440, "which target a drafter fits, and was trained for"),
    "auto": (45, 6.4, 440, "AutoDrafter: any drafter by its name"),
    "checkpoints": (45, 7.4, 910, "layouts, loading, conversion, saves in one piece"),
    "models": (45, 8.4, 520, "the drafters: what a saved drafter carries; imports nothing of ours"),
    "widest_float": (580, 8.4, 180, "float64, if there is one"),
    "likeliest": (775, 8.4, 180, "argmax, sooner on a CPU"),
}
# What the others stand on; an arrow to its frame stands for all that lead into it.
BASE = ("user_input", "pairing", "auto", "checkpoints", "models", "widest_float", "likeliest")
# Modules rather than folders.
FILES = ("auto", "by_name", "likeliest", "services", "serving", "widest_float")
# Those of tests/test_layering.py's arrows that don't follow from others, but for the ones into the base.
SHOWN_ARROWS = (
    ("demo", "evaluation"),
    ("demo", "hub"),
    ("demo", "terminal"),
    ("evaluation", "generation"),
    ("services", "hub"),
    ("making", "datagen"),
    ("datagen", "training"),
    ("datagen", "generation"),
    ("by_name", "generation"),
    ("generation", "ngram"),
    ("user_input", "auto"),
    ("auto", "checkpoints"),
    ("pairing", "checkpoints"),
    ("checkpoints", "models"),
)
ARROWS_TO_BASE = ("generation", "ngram", "hub", "services", "serving", "terminal", "training")
# Of these, what has something else below it.
AROUND = ("generation", "terminal")
FOLDER_HEIGHT = 54


def folder_place(name: str) -> tuple[float, float, float]:
    """Left end, top and width."""
    x, row, width, _ = FOLDERS[name]
    return x, 25 + 76 * row, width


def draw_import(picture: Drawing, start: str, end: str) -> None:
    x, y, width = folder_place(start)
    to_x, to_y, to_width = folder_place(end)
    if y == to_y:
        middle = y + FOLDER_HEIGHT / 2
        ends = (x, to_x + to_width + 2) if x > to_x else (x + width, to_x - 2)
        picture.line([(end, middle) for end in ends], arrow=True)
        return
    if x >= to_x + to_width:
        # Around what stands between them.
        out, down = y + FOLDER_HEIGHT - 10, to_y + FOLDER_HEIGHT / 2
        picture.line([(x, out), (x - 8, out), (x - 8, down), (to_x + to_width + 2, down)], arrow=True)
        return
    # Straight down, from the middle of the narrower one.
    middle = x + width / 2 if width <= to_width else to_x + to_width / 2
    picture.line([(middle, y + FOLDER_HEIGHT), (middle, to_y - 2)], arrow=True)


def architecture_picture() -> Drawing:
    picture = Drawing(1000, 752, "The folders of hf_pardraft, and which may import which")
    picture.box(25, 25, 950, FOLDER_HEIGHT, "panel edge", radius=8)
    picture.text(500, 48, "cli/ and __init__", "text", 17, bold=True)
    picture.text(500, 68, "the entry points: they may import everything", "muted", 13.5)
    base_top = folder_place(BASE[0])[1] - 20
    picture.box(25, base_top, 950, 322, "ground line", radius=10)
    for start, end in SHOWN_ARROWS:
        draw_import(picture, start, end)
    for start in ARROWS_TO_BASE:
        x, y, width = folder_place(start)
        out = y + FOLDER_HEIGHT - 10
        way = [(x, out), (x - 8, out)] if start in AROUND else [(x + width / 2, y + FOLDER_HEIGHT)]
        picture.line([*way, (way[-1][0], base_top - 2)], arrow=True)
    for name, (_, _, _, purpose) in FOLDERS.items():
        left, top, width = folder_place(name)
        classes = "draft draft-line" if name == "models" else "panel edge"
        picture.box(left, top, width, FOLDER_HEIGHT, classes, radius=8)
        picture.text(left + width / 2, top + 23, name if name in FILES else name + "/", "text", 17, bold=True)
        picture.text(left + width / 2, top + 43, purpose, "muted", 13.5)
    return picture


# The plot.
DRAFTERS = ("PARD", "DFlash", "DFlare", "DART")


def measured() -> dict[str, dict[str, float]]:
    """Tokens a second and tau of the chains on stories260K, by name and by "eager" and "compiled"."""
    (run,) = [run for run in json.loads(RESULTS.read_text())["runs"] if run["target"] == "stories260k"]
    rows = {row["name"]: row for row in run["rows"]}
    found = {
        "plain generate": {
            "eager": rows["plain"]["tokens_per_second"],
            "compiled": rows["plain compiled"]["tokens_per_second"],
            "tau": rows["plain"]["tau"],
        }
    }
    for name in DRAFTERS:
        found[name] = {
            "eager": rows[f"{name}, ours"]["tokens_per_second"],
            "compiled": rows[f"{name}, ours compiled"]["tokens_per_second"],
            "tau": rows[f"{name}, ours"]["tau"],
        }
    return found


def plot() -> Drawing:
    found = measured()
    picture = Drawing(1000, 430, "Tokens a second on stories260K, with and without drafters")
    picture.text(24, 38, "stories260K on one CPU core: tokens a second", "text", 19, "start", bold=True)
    picture.text(24, 62, "greedy, float32, chains of 7 or 8 tokens, the same text in every bar", "muted", 14, "start")
    picture.box(650, 24, 14, 14, "slow", radius=2)
    picture.text(671, 36, "uncompiled", "text", 14, "start")
    picture.box(770, 24, 14, 14, "fast", radius=2)
    picture.text(791, 36, 'compiled (cache "static")', "text", 14, "start")
    left, scale = 170, 640 / max(row["compiled"] for row in found.values())
    plain = found["plain generate"]["eager"]
    for number, (name, row) in enumerate(found.items()):
        top = 88 + 66 * number
        picture.text(left - 14, top + 22, name, "text", 16, "end", bold=True)
        if name in DRAFTERS:
            picture.text(left - 14, top + 41, f"tau {row['tau']:.2f}", "muted", 13, "end")
        for y, kind, classes in ((top, "eager", "slow"), (top + 25, "compiled", "fast")):
            speed = row[kind]
            picture.box(left, y, speed * scale, 21, classes, radius=3)
            times = "" if speed == plain else f" · {speed / plain:.1f}x"
            picture.text(left + speed * scale + 9, y + 16, f"{speed:,.0f}{times}", "text", 14, "start")
    return picture


PICTURES = {"round.svg": round_picture, "architecture.svg": architecture_picture, "stories260k.svg": plot}

if __name__ == "__main__":
    for file_name, draw in PICTURES.items():
        (HERE / file_name).write_text(draw().svg(), encoding="utf-8")
