"""`python -m hf_pardraft` is the `pardraft` command."""

from .cli.app import main
from .making.runner import end_with_parent

end_with_parent()
main()
