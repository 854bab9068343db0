"""Unfinished Python, in the manner of the standard library, for the demo target to complete."""

FUNCTION_HEAD = '''\
import os


def relative_names(path, suffix=".py"):
    """Return the names of all files below path that end with suffix.

    The names are relative to path, and sorted.
    """
    names = []
    for root, dirs, files in os.walk(path):
'''

CLASS_HEAD = '''\
class Stack:
    """A last-in, first-out stack of objects."""

    def __init__(self, items=None):
        self._items = []
        if items is not None:
            self._items.extend(items)

    def __len__(self):
        return len(self._items)

    def __repr__(self):
'''

DOCSTRING = '''\
def parse_header(line):
    """Parse a header line into a name and a value.

    Raise ValueError if there is no colon in the line.
    """
    if not isinstance(line, str):
        raise TypeError("line must be a string, not %r" % type(line))
'''

EXCEPTIONS = '''\
class Error(Exception):
    """Base class for exceptions in this module."""


class ClosedError(Error):
    """Raised when an operation is attempted on a closed file."""


class Reader:
    def __init__(self, file):
        self.file = file
        self.closed = False

    def close(self):
'''

COMMAND_LINE = """\
def main():
    import argparse
    parser = argparse.ArgumentParser(description="Count the words of a file")
    parser.add_argument("filename", help="the file to read")
    parser.add_argument("-v", "--verbose", action="store_true",
"""

UNIT_TEST = """\
import unittest


class CounterTest(unittest.TestCase):

    def setUp(self):
        self.counter = Counter()

    def test_empty(self):
        self.assertEqual(len(self.counter), 0)

    def test_
"""

PROMPTS = tuple(
    prompt.rstrip("\n") for prompt in (FUNCTION_HEAD, CLASS_HEAD, DOCSTRING, EXCEPTIONS, COMMAND_LINE, UNIT_TEST)
)
