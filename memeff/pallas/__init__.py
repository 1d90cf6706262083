"""List the families of kernels: one package for each kind of hardware.

A family has the functions of an implementation (`describe`, `forward`, `backward`, `tangent`),
`for_device` and `why_not`, which say in one sentence why its kernels cannot run on a device or a
call, `slower` and `fused_is_faster`, which say what measurements found, `reads_entries`, which says
whether its kernels choose the batch entries that they read, and `temp_bytes`. Its module
`vocabulary` has the functions that `memeff.vocabulary` calls for the loss. A family imports no
kernel before it runs one. To add a family, add a package and a row.
"""

from types import ModuleType

from memeff.device import Device
from memeff.pallas.ampere import implementation as ampere_family
from memeff.pallas.hopper import implementation as hopper_family
from memeff.pallas.tpu import implementation as tpu_family

FAMILIES: tuple[ModuleType, ...] = (hopper_family, tpu_family, ampere_family)


def family_for(device: Device) -> ModuleType:
    """Return the first family whose kernels run on `device`.

    Without one, return the first family of all, which says why. The Ampere kernels run on GPUs that
    others run on, too, but only where `ampere.capability.chosen` says so.
    """
    if ampere_family.for_device(device) is None:
        return ampere_family
    return next((family for family in FAMILIES if family.for_device(device) is None), FAMILIES[0])
