"""`python -m hf_pardraft` is the `pardraft` command."""

from .cli.app import main

main()
