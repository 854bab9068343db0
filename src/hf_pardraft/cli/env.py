"""`pardraft env`: what a bug report should say about this machine."""

import platform

import torch

from ..user_input.options import available_devices
from .options import print_facts


def env() -> None:
    """Print versions and devices, for a bug report."""
    from ..evaluation.facts import installed_versions

    facts = installed_versions()
    facts |= {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {"threads": str(torch.get_num_threads()), "devices": ", ".join(available_devices())}
    print_facts(facts)
