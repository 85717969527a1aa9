"""The numbers in docs/limits.md are those of the code."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from pvrdma_server.backend_soft import SoftConfig
from pvrdma_server.caps import LIMIT_NAMES, DeviceConfig, survivable

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
_ROW = re.compile(r"^\| `(\w+)` \|[^|]+\| (\d+) \| (\d+) \|$", re.M)


def test_defaults_and_most() -> None:
    rows = {
        name: (int(default), int(most)) for name, default, most in _ROW.findall(PAGE.read_text())
    }
    soft = SoftConfig(name="any", node_guid=bytes(8))
    own = {field.name for field in fields(SoftConfig)}
    expected = {}
    for name in LIMIT_NAMES:
        device = getattr(DeviceConfig(), name)
        default = min(device, getattr(soft, name)) if name in own else device
        # The size of an entry grows with the elements: the most of one limit is with the others at their defaults.
        most: dict[str, Any] = {name: 1 << 31}
        alone = survivable(DeviceConfig(**most))
        expected[name] = (default, getattr(alone, name))
    assert rows == expected
