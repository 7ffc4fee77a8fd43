"""Let verl 0.9.1 run on a machine without GPUs, for check_verl.py: a plugin like verl_lopti.py.

A platform "cpu" in verl's own registry, verl's FSDP engine registered for it, and gloo.
"""

import os

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform


def nothing(*args, **kwargs):
    return 0


class Device:
    """torch.cpu and, as nothing, what torch.cuda has beyond it."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name, nothing)

    def mem_get_info(self):
        return 0, 0

    def get_device_name(self):
        return "CPU"


members = {name: nothing for name in PlatformBase.__abstractmethods__} | {
    "device_name": "cpu",
    "vendor_name": "cpu",
    "device_module": property(lambda self: Device()),
    "current_device": lambda self: "cpu",
    "get_device_capability": lambda self, device=0: (None, None),
    "communication_backend_name": lambda self: "gloo",
    "visible_devices_envvar": lambda self: "CPU_VISIBLE_DEVICES",
    "ray_resource_name": lambda self: "CPU",
    "ray_noset_envvars": lambda self: [],
}
set_platform(type("PlatformCPU", (PlatformBase,), members)())
if "WG_PREFIX" in os.environ:  # in a worker: verl would ask for "cpu:gloo,cpu:gloo"
    torch.distributed.init_process_group("gloo")

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

EngineRegistry.register("language_model", "fsdp2", "cpu")(FSDPEngineWithLMHead)
