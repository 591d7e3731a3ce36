"""The device that the twin models: AMD NPU2 (Strix, XDNA 2, AIE2P).

Array and memory sizes: Xilinx/mlir-air e972f2942, kernel registry documents. Identity of the PCI function:
the public amdxdna kernel driver (0x17f0 is Strix). Texts of the queries: XRT 2.25.0.
"""

from __future__ import annotations

import json

NAME = "NPU Strix (twin, modelled)"
BDF = "0000:c5:00.1"
XRT_VERSION = "2.25.00"

MAX_HW_CONTEXTS = 9
"""Hardware contexts that can be open at the same time in one process.

Published deployments report that a process with about ten loaded ELFs is refused the next context with
errno 22 (Xilinx/mlir-air e972f2942, smolvla profile). The twin takes the strict reading, nine, so that what
runs here is not refused there.
"""

MAX_BO_BYTES = 1 << 32
"""Largest buffer object: device addresses within one buffer are 32 bits wide."""


COLUMNS = 8
ROWS = 4
TILES = COLUMNS * ROWS
"""Compute tiles."""
L1_BYTES = 64 * 1024
"""Memory of one compute tile."""
L2_BYTES = 512 * 1024
"""Memory of one column's memory tile."""
SHIM_STREAMS = 2 * COLUMNS
"""Host-to-array channels of the whole array, two per column; as many run the other way."""
MAX_REPEAT = 255
"""Repeats of one queue push of a descriptor."""
MAX_STRIDE = 1048576
"""Largest stride of a descriptor, in elements."""


def info(query: str) -> str:
    """Answer of ``device.get_info`` for the query's name, in the form XRT gives on an NPU.

    Raises RuntimeError with XRT's text for the queries that the NPU driver does not answer.
    """
    if query in _REFUSED:
        raise RuntimeError(_REFUSED[query])
    if query in _PLAIN:
        return _PLAIN[query]
    # XRT's writer escapes the slash and breaks the line of an empty object
    text = json.dumps(_JSON[query], indent=4).replace("/", "\\/")
    return ("{\n}" if text == "{}" else text) + "\n"


_REFUSED = {
    "interface_uuid": "No such query request (185)",
    "kdma": "bad any_cast",
    "max_clock_frequency_mhz": "No such query request (72)",
    "nodma": "No such query request (70)",
    "offline": "No such query request (180)",
}

_PLAIN = {"bdf": BDF, "m2m": "0", "name": NAME}

_ELECTRICAL: dict[str, object] = {
    "power_rails": "",
    "power_consumption_watts": "N/A",
    "power_consumption_max_watts": "N/A",
    "power_consumption_warning": "N/A",
}

_JSON: dict[str, dict[str, object]] = {
    "electrical": _ELECTRICAL,
    "thermal": {"thermals": {"msg": "No sensors present"}},
    "mechanical": {"fans": {"msg": "No sensors present"}},
    "memory": {"error_msg": "No such query request (28)"},
    "platform": {
        "platforms": [
            {
                "static_region": {"name": NAME, "total_columns": str(COLUMNS)},
                "status": {"power_mode": "default"},
                "electrical": _ELECTRICAL,
            }
        ]
    },
    "pcie_info": {
        "vendor": "0x1022",
        "device": "17f0",
        "revision": "11",
        "sub_device": "0x17f0",
        "sub_vendor": "0x1022",
    },
    "host": {
        "version": XRT_VERSION,
        "branch": "",
        "hash": "",
        "build_hash_date": "",
        "drivers": [{"name": "amdxdna", "version": "2.25.0", "hash": "unknown"}],
    },
    "dynamic_regions": {"dynamic_regions": ""},
    "vmr": {},
}
