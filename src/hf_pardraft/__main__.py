"""`python -m hf_pardraft` is the `pardraft` command."""

from .cli import main

main()
