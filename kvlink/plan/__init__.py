"""Stage 2: the copies between two layouts, compiled once per pair of peers.

Pairing is by name and global index (group, layer, component, head), never by position. A target that draws from
several sources first elects who delivers what. A request adds only its block tables; native code pairs them.
"""

from kvlink.plan.conversion import (
    Conversions,
    as_delivered,
    check_conversions,
    compile_conversion,
    conversions_of,
)
from kvlink.plan.selection import select
from kvlink.plan.template import compile_template

__all__ = [
    "Conversions",
    "as_delivered",
    "check_conversions",
    "compile_conversion",
    "compile_template",
    "conversions_of",
    "select",
]
