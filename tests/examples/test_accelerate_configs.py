"""The configurations for several processes are ones that accelerate takes."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

FOLDER = Path(__file__).parents[2] / "examples" / "accelerate"
# What makes each of them what it is called.
EXPECTED = {
    "ddp": ("MULTI_GPU", {}),
    "fsdp2": ("FSDP", {"fsdp_version": 2, "fsdp_state_dict_type": "FULL_STATE_DICT"}),
    "deepspeed_zero2": ("DEEPSPEED", {"zero_stage": 2, "zero3_save_16bit_model": True}),
}


def test_every_configuration_is_tried():
    assert {path.stem for path in FOLDER.iterdir()} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_configuration_is_one_that_accelerate_takes(name):
    kind, settings = EXPECTED[name]
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert config.distributed_type == kind
    found = {**config.fsdp_config, **config.deepspeed_config}
    assert {key: found[key] for key in settings} == settings
    launcher = launch_command_parser()
    known = {action.dest for action in launcher._actions}
    # DeepSpeed's are handed on without the launcher's own prefix.
    assert {key for key in found if key not in known} == set()
