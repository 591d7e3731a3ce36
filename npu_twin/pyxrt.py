"""The driver seam: AMD's ``pyxrt`` of XRT 2.25.0 in software.

Same names, argument order, positional-only rules, overloads, enum objects, return types, exception types and
texts. Program listings take the place of compiled ELFs. Deliberate deviations are listed in
``npu_twin/deviations.json``; everything else is meant to be indistinguishable.
"""

import sys as _sys
import types as _types

from npu_twin._xrt import enums as _enums
from npu_twin._xrt.buffer import bo as bo
from npu_twin._xrt.buffer import ext_bo as _ext_bo
from npu_twin._xrt.context import elf as elf
from npu_twin._xrt.context import ext_kernel as _ext_kernel
from npu_twin._xrt.context import hw_context as hw_context
from npu_twin._xrt.context import kernel as kernel
from npu_twin._xrt.context import module as module
from npu_twin._xrt.context import program as program
from npu_twin._xrt.device import device as device
from npu_twin._xrt.device import enumerate_devices as enumerate_devices
from npu_twin._xrt.device import log_message as log_message
from npu_twin._xrt.device import uuid as uuid
from npu_twin._xrt.device import xclbin as xclbin
from npu_twin._xrt.device import xclbinip_vector as xclbinip_vector
from npu_twin._xrt.device import xclbinkernel_vector as xclbinkernel_vector
from npu_twin._xrt.device import xclbinmem_vector as xclbinmem_vector
from npu_twin._xrt.enums import ert_cmd_state as ert_cmd_state
from npu_twin._xrt.enums import xclBOSyncDirection as xclBOSyncDirection
from npu_twin._xrt.enums import xrt_info_device as xrt_info_device
from npu_twin._xrt.enums import xrt_msg_level as xrt_msg_level
from npu_twin._xrt.run import run as run
from npu_twin._xrt.run import runlist as runlist

XCL_BO_FLAGS_NONE = 0

ext = _types.ModuleType(f"{__name__}.ext")
for _name, _value in (
    ("access_mode", _enums.ext_access_mode),
    ("bo", _ext_bo),
    ("kernel", _ext_kernel),
):
    setattr(ext, _name, _value)
_enums.export_values(_enums.ext_access_mode, ext)
_enums.export_values(xrt_msg_level, _sys.modules[__name__])
_sys.modules[ext.__name__] = ext

del _name, _value
