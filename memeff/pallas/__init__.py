"""List the families of kernels: one package for each kind of hardware.

A family has these functions:
  describe, forward, backward, tangent   those of an implementation
  for_device, why_not                    a sentence: why kernels cannot run on a device, a call
  slower, fused_is_faster                what measurements found
  reads_entries                          whether its kernels choose the batch entries that they read
  temp_bytes                             an estimate of temporary memory
Its `vocabulary` is None, or has the functions that `memeff.vocabulary` calls for the loss. A family
imports no kernel before it runs one. To add a family, add a package and a row.
"""

from types import ModuleType

from memeff.device import Device
from memeff.pallas.ampere import implementation as ampere_family
from memeff.pallas.hopper import implementation as hopper_family
from memeff.pallas.tpu import implementation as tpu_family

# The first that runs on a device is taken. Tests choose the Ampere kernels on Hopper GPUs, too.
FAMILIES: tuple[ModuleType, ...] = (ampere_family, hopper_family, tpu_family)


def family_for(device: Device) -> ModuleType:
    """Return the first family whose kernels run on `device`.

    If none runs there, return the one that says why: on other GPUs than Hopper's the Ampere family.
    """
    for family in FAMILIES:
        if family.for_device(device) is None:
            return family
    other_gpu = device.platform == "gpu" and device.capability not in (None, "9.0")
    return ampere_family if other_gpu else hopper_family
